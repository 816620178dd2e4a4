"""Beam search, against transformers' generate, on tiny random models."""

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from megatron.apps.generation.decoding.beams import BeamSearch
from megatron.apps.generation.decoding.text_stream import continuation_text
from megatron.apps.generation.request import Beams, StopRules
from megatron.config import TokenizerConfig
from megatron.features.tokenizers.byte_level import ByteLevelTokenizer

VOCAB, STOP, NEW = 60, 7, 8


@pytest.fixture(scope="module")
def models():
    """Models by name, whose probabilities differ widely."""
    small = {"vocab_size": VOCAB, "eos_token_id": STOP, "bos_token_id": 0, "pad_token_id": 1}
    wide = {"initializer_range": 0.3}
    gpt2 = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, **small, **wide)
    llama = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        **small, **wide,
    )  # fmt: skip
    t5 = T5Config(
        d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2, decoder_start_token_id=1,
        initializer_factor=3.0, **small,
    )  # fmt: skip
    made = {}
    for kind, config in (
        (GPT2LMHeadModel, gpt2), (LlamaForCausalLM, llama), (T5ForConditionalGeneration, t5)
    ):  # fmt: skip
        torch.manual_seed(3)
        made[config.model_type] = kind(config).eval()
    return made


def search(next_logits, beams, stopping, **options):
    """All of a search, the logits recomputed for every beam and step."""
    search = BeamSearch(beams, stopping, **options)
    rows = [[]]
    while not search.done:
        going = search.step(next_logits(rows))
        rows = [[*rows[row], token] for row, token in going]
        assert len(set(map(tuple, rows))) == len(rows)
    return search.results()


@torch.inference_mode()
def compare(model, prompt, beams, stops):
    encoder = model.config.is_encoder_decoder
    theirs = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=beams.width,
        num_return_sequences=beams.width,
        length_penalty=beams.length_penalty,
        max_new_tokens=NEW,
        eos_token_id=list(stops),
        pad_token_id=1,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    start = 1 if encoder else len(prompt)

    def next_logits(rows):
        if encoder:
            given = torch.tensor([prompt] * len(rows))
            logits = model(
                input_ids=given, decoder_input_ids=torch.tensor([[1, *row] for row in rows])
            ).logits
        else:
            logits = model(torch.tensor([[*prompt, *row] for row in rows])).logits
        return logits[:, -1].float()

    ours = search(next_logits, beams, StopRules(NEW, tokens=frozenset(stops)))
    assert len(ours) == beams.width
    for result, sequence, score in zip(
        ours, theirs.sequences.tolist(), theirs.sequences_scores.tolist(), strict=True
    ):
        tokens = sequence[start:]
        assert list(result.tokens) == tokens[: len(result.tokens)]
        assert set(tokens[len(result.tokens) :]) <= {1}
        assert result.score == pytest.approx(score, abs=2e-5, rel=1e-5)
    return ours


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
@pytest.mark.parametrize(
    ("width", "length_penalty", "stops"),
    [
        (6, 1.0, (7,)), (2, 1.0, (7,)), (4, 0.0, (7, 8, 9)), (5, -1.0, (7,)), (3, 2.0, (5, 6, 7)),
        (4, 0.6, tuple(range(4, 24))),
    ],
)  # fmt: skip
def test_against_transformers(models, name, width, length_penalty, stops):
    found = [
        compare(models[name], prompt, Beams(width, length_penalty), stops)
        for prompt in ([3, 9, 20], [30, 31, 32, 33, 34])
    ]
    lengths = {len(result.tokens) for results in found for result in results}
    if len(stops) > 10:
        assert len(lengths) > 1, "the stops should end some beams early"


def fixed(seed=0, stop_bias=0.0):
    """Logits that depend on the last token."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    table[:, STOP] += stop_bias
    return lambda rows: table[[row[-1] if row else 0 for row in rows]]


def test_results_are_ranked_by_their_scores():
    """Log-probabilities of the tokens, summed and divided."""
    logits, wanted = fixed(), StopRules(NEW, tokens=frozenset([STOP]))
    results = search(logits, Beams(4, 0.7), wanted, logprobs=2)
    assert [r.score for r in results] == sorted((r.score for r in results), reverse=True)
    for result in results:
        before = []
        for token, score in zip(result.tokens, result.scores, strict=True):
            expected = logits([before])[0].double().log_softmax(-1)
            assert score.token == token and len(score.top) == 2
            assert score.logprob == pytest.approx(float(expected[token]), abs=1e-6)
            before.append(token)
        total = sum(score.logprob for score in result.scores)
        assert result.score == pytest.approx(total / len(result.tokens) ** 0.7, abs=1e-5)


def test_a_stop_that_is_ranked_behind_the_width_is_skipped():
    logits = torch.full((1, VOCAB), -50.0)
    logits[0, [10, 11, STOP, 12]] = torch.tensor([3.0, 2.0, 1.0, 0.0])
    skipped = BeamSearch(Beams(2), StopRules(NEW, frozenset([STOP])))
    assert skipped.step(logits) == [(0, 10), (0, 11)] and not skipped.results()
    logits[0, [STOP, 10, 8, 11]] = torch.tensor([3.0, 2.0, 1.0, 0.5])
    behind = BeamSearch(Beams(2), StopRules(NEW, frozenset([STOP, 8])))
    assert behind.step(logits) == [(0, 10), (0, 11)]
    assert [result.tokens for result in behind.results()] == [(STOP,)]
    logits[0, [10, 11, STOP, 12, 8]] = torch.tensor([3.0, 2.0, 1.0, 0.0, -50.0])
    taken = BeamSearch(Beams(3), StopRules(NEW, frozenset([STOP])))
    assert taken.step(logits) == [(0, 10), (0, 11), (0, 12)]
    assert [result.tokens for result in taken.results()] == [(STOP,)]


def test_stop_texts_end_beams_across_tokens():
    tokenizer = ByteLevelTokenizer.from_config(TokenizerConfig(tokenizer_type="ByteLevelTokenizer"))
    table = torch.randn(tokenizer.vocab_size, tokenizer.vocab_size) * 0.01
    for before, after in ("ha", "ab", "bc", "cd", "da", "ac", "ca"):
        table[ord(before), ord(after)] += 10

    def logits(rows):
        return table[[row[-1] if row else ord("h") for row in rows]]

    wanted = StopRules(9, texts=("abc", "acd"))
    results = search(logits, Beams(3), wanted, tokenizer=tokenizer, prompt=tokenizer.tokenize("h"))
    texts = [continuation_text(tokenizer, [], result.tokens) for result in results]
    assert {"abc", "acd"} <= set(texts)
    for text in texts:
        assert not any(stop in text[:-1] for stop in wanted.texts)


@pytest.mark.parametrize(
    ("stopping", "message"),
    [(StopRules(0), "max_new_tokens"), (StopRules(3, texts=("a",)), "need a tokenizer")],
)
def test_what_cannot_be_searched(stopping, message):
    with pytest.raises(ValueError, match=message):
        BeamSearch(Beams(2), stopping)


def test_logits_that_are_no_numbers():
    with pytest.raises(ValueError, match="NaN"):
        BeamSearch(Beams(2), StopRules(3)).step(torch.full((1, 9), torch.nan))
