"""The runner on one process, against transformers, and what must not change its numbers."""

import dataclasses
import json
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from configs import run_config, with_flags
from generation_models import (
    PROMPTS,
    SHAPES,
    VOCAB,
    play,
    same,
    save_theirs,
    their_greedy,
    tolerance,
)
from generation_models import their_model as make_theirs
from gpt_forward import forward

from megatron.apps.generation import opening
from megatron.apps.generation.execution import paged_attention, row_rule
from megatron.apps.generation.execution.runner import PagedRunner, page_shape
from megatron.apps.generation.execution.stages import StagedLayers
from megatron.apps.generation.memory import CacheConfig
from megatron.apps.generation.request import SequencePart, StepInput
from megatron.config import ConfigError
from megatron.families import family_of, spec_of
from megatron.features.masked.batch import T5Batch
from megatron.formats.huggingface.source import HuggingFaceFolder
from megatron.formats.inspection import model_of
from megatron.parallel.mesh import SINGLE, Mesh

CPU = torch.device("cpu")
COUNT = 12
MASK = paged_attention._mask
TOKENIZER = SimpleNamespace(pad=0, bos=0)
their_model = cache(make_theirs)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Makes a runner of a shape, and its model."""
    loaded = {}

    def make(shape, pages=60, page_size=8, dtype=torch.float32):
        if (shape, dtype) not in loaded:
            folder = save_theirs(tmp_path_factory.mktemp("theirs") / shape, shape)
            source = HuggingFaceFolder(folder)
            loaded[shape, dtype] = source.model, model_of(source, dtype, CPU)
        config, model = loaded[shape, dtype]
        generation = family_of(config.family).generation(run_config(model=config), TOKENIZER)
        stages = StagedLayers.alone(model, config.hidden_size)
        return PagedRunner(stages, config, generation, pages, page_size)

    return make


def some(*chosen):
    """All shapes; those that are not chosen are long tests."""
    proof = pytest.mark.proof
    return [pytest.param(s, marks=[] if s in chosen else [proof]) for s in SHAPES]


# The others are in scheduling/test_engine_of_models.py.
@pytest.mark.parametrize("shape", some("llama", "mistral"))
def test_greedy_against_transformers(shape, made):
    """Texts of several lengths under way together, prompts in pieces."""
    texts = play(made(shape), PROMPTS, COUNT, chunk=5, together=4)
    for text, prompt in zip(texts, PROMPTS, strict=True):
        tokens, log_probs = their_greedy(their_model(shape), prompt, COUNT)
        assert text.tokens == tokens
        torch.testing.assert_close(text.log_probs, log_probs, rtol=0, atol=tolerance(shape))
    assert len({tuple(text.tokens) for text in texts}) > 2


@pytest.mark.parametrize("shape", some("gemma2", "qwen3", "t5"))
def test_alone_in_a_crowd_and_in_pieces(shape, made):
    runner = made(shape, pages=120, page_size=4)
    crowd = play(runner, PROMPTS, COUNT)
    alone = [play(runner, [prompt], COUNT, shuffled=False)[0] for prompt in PROMPTS]
    assert same(crowd, alone)
    assert same(play(runner, PROMPTS, COUNT, chunk=3, together=3), alone)


KINDS = {
    "half_rotary": {"position_embedding_type": "rope", "rotary_percent": 0.5},
    "alibi": {"position_embedding_type": "alibi", "embed_layernorm": True},
    "windows": {
        "llama": True,
        "sliding_window": 4,
        "window_attn_skip_freq": 2,
        "qk_layernorm": True,
        "attn_logit_softcapping": 2.0,
    },
    "narrow": {"position_embedding_offset": 2, "sliding_window": 3, "parallel_residual": True},
    "kv_heads=1": {"llama": True, "num_query_groups": 1},
    "sinks": {
        "llama": True,
        "num_query_groups": 2,
        "sliding_window": 4,
        "window_attn_skip_freq": 2,
        "softmax_type": "learnable",
    },
    "chunks": {
        "llama": True,
        "attention_chunk_size": 6,
        "window_attn_skip_freq": 2,
        "no_rope_freq": 2,
        "attention_temperature": 0.5,
        "attention_temperature_floor": 3,
        "qk_l2_norm": True,
    },
    "gate": {"llama": True, "attention_output_gate": True, "rotary_interleaved": True},
    "off_by_one": {"position_embedding_type": "alibi", "softmax_type": "off-by-one"},
}
GPT_PROMPTS = [prompt for prompt in PROMPTS if len(prompt) < 20]


def runner_of(config, model, page_size=4, pages=90):
    generation = family_of("gpt").generation(config, None)
    return PagedRunner(
        StagedLayers.alone(model, config.model.hidden_size),
        config.model,
        generation,
        pages,
        page_size,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_against_the_model_without_pages(kind, gpt_config, random_gpt):
    """In float64; to the last position, in any pieces, and the same bits alone."""
    config = gpt_config(**KINDS[kind])
    model = random_gpt(config).double()
    runner = runner_of(config, model)
    texts = play(runner, GPT_PROMPTS, 13, chunk=3, together=3)
    for text in texts:
        with torch.inference_mode():
            logits = forward(model, torch.tensor([text.prompt + text.tokens[:-1]]))[0, :, :61]
        log_probs = logits.log_softmax(-1)
        after = len(text.prompt) - 1
        torch.testing.assert_close(text.log_probs.double(), log_probs[after:], rtol=0, atol=1e-6)
        if after:
            given = log_probs[:after].gather(1, torch.tensor(text.prompt[1:])[:, None])[:, 0]
            torch.testing.assert_close(text.prompt_log_probs, given.float(), rtol=0, atol=1e-6)
    assert same(texts, play(runner, GPT_PROMPTS, 13, shuffled=False))


def test_sinks_of_an_encoder_and_a_decoder(tmp_path, random_gpt):
    """In float64, of all three kinds of attention, against the model in one pass."""
    plain = HuggingFaceFolder(save_theirs(tmp_path / "t5", "t5")).model
    config = run_config(model=with_flags(plain, softmax_type="learnable"))
    model = random_gpt(config).double()
    generation = family_of("t5").generation(config, TOKENIZER)
    stages = StagedLayers.alone(model, config.model.hidden_size)
    runner = PagedRunner(stages, config.model, generation, 60, 8)
    prompts = [prompt for prompt in PROMPTS if len(prompt) > 1]
    texts = play(runner, prompts, COUNT, chunk=5, together=3)
    for text, prompt in zip(texts, prompts, strict=True):
        asked, said = torch.tensor([prompt]), torch.tensor([text.prompt + text.tokens[:-1]])
        ones = (torch.ones_like(x) for x in (asked, said))
        batch = T5Batch(asked, said, said, torch.ones(said.shape), *ones)
        with torch.inference_mode():
            logits = model(spec_of(config.model).begin(batch).changed(targets=None)).hidden[0]
        expected = logits[:, :VOCAB].log_softmax(-1)
        torch.testing.assert_close(text.log_probs.double(), expected, rtol=0, atol=1e-6)
    assert same(texts, play(runner, prompts, COUNT, shuffled=False))


@pytest.mark.parametrize("window", [None, 10])
def test_masks_do_not_grow_with_a_prompt(window, gpt_config, random_gpt, monkeypatch):
    made = []
    monkeypatch.setattr(paged_attention, "_mask", lambda *of: made.append(of) or MASK(*of))
    config = gpt_config(sliding_window=window)
    play(runner_of(config, random_gpt(config), page_size=2), [[7] * 19], 1)
    assert 0 < len(set(made)) <= 3


def test_most_probable_tokens(gpt_config, random_gpt):
    config = gpt_config()
    model = random_gpt(config)
    prompt = tuple(GPT_PROMPTS[2])
    part = SequencePart(prompt, 0, (3, 1, 2), targets=prompt[1:], top=5)
    (scores,) = runner_of(config, model).run(StepInput((part,))).scores
    with torch.inference_mode():
        logits = forward(model, torch.tensor([prompt]))[0, :-1, :61]
    expected = logits.log_softmax(-1).topk(5)
    assert torch.equal(scores.top_tokens, expected.indices)
    torch.testing.assert_close(scores.top_logprobs, expected.values, rtol=0, atol=1e-6)


def test_shared_and_copied_pages(gpt_config, random_gpt):
    """Two texts with the same first pages, of which one has a copy of the last."""
    config = gpt_config()
    runner = runner_of(config, random_gpt(config))
    prompt = tuple(range(10))
    runner.run(StepInput((SequencePart(prompt, 0, (7, 2, 5)),)))

    def decoded(*tables, copies=()):
        parts = tuple(SequencePart((at,), 10, pages, True, True) for at, pages in tables)
        return runner.run(StepInput(parts, copies)).logits_RV

    both = decoded((20, (7, 2, 5)), (30, (7, 2, 6)), copies=((5, 6),))
    assert torch.equal(both[:1], decoded((20, (7, 2, 5))))
    assert torch.equal(both[1:], decoded((30, (7, 2, 40)), copies=((5, 8), (8, 40))))
    assert not torch.equal(both[0], both[1])


def test_memory_of_the_pages(gpt_config, random_gpt):
    """2 x blocks x heads x positions x width x bytes for each page; no more than asked for."""
    config = gpt_config(llama=True, num_query_groups=2)
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        model = random_gpt(config).to(dtype)
        shape = page_shape(StagedLayers.alone(model, 32), config.model, 16)
        assert shape.bytes == 2 * 2 * 2 * 16 * 8 * size
        pages = CacheConfig(kv_cache_gib=1e-4).pages(shape, 24, CPU, SINGLE)
        assert pages == int(1e-4 * 2**30 // shape.bytes)
        (before,) = runner_of(config, model, 16, pages).memory.pools
        assert before.untyped_storage().nbytes() == pages * shape.bytes
    assert CacheConfig(kv_cache_fraction=1e-3).pages(shape, 24, CPU, SINGLE) <= 512
    with pytest.raises(ConfigError, match=r"--kv-cache-gib 1e-07 .* 24 positions, needs 2: give"):
        CacheConfig(kv_cache_gib=1e-7).pages(shape, 24, CPU, SINGLE)
    with pytest.raises(ConfigError, match="contradicts --kv-cache-fraction"):
        CacheConfig(kv_cache_gib=1.0, kv_cache_fraction=0.5).pages(shape, 24, CPU, SINGLE)


def test_what_was_in_a_page_before_does_not_matter(gpt_config, random_gpt):
    config = gpt_config()
    runner = runner_of(config, random_gpt(config))
    runner.memory.pools[0].fill_(torch.nan)
    first = play(runner, GPT_PROMPTS, 5)
    assert all(torch.isfinite(text.log_probs).all() for text in first)
    runner.memory.pools[0].fill_(3e38)
    assert same(play(runner, GPT_PROMPTS, 5), first)


def test_where_rows_depend_on_their_number(gpt_config, random_gpt, monkeypatch):
    """Then all passes have one number of rows, and results depend on nothing else either."""
    config = gpt_config(llama=True)
    model = random_gpt(config)
    expected = play(runner_of(config, model), GPT_PROMPTS, 8)
    linear = F.linear

    def unsteady(x, weight, bias=None):
        return linear(x, weight, bias) * (1 + 1e-7 * x.shape[:-1].numel())

    monkeypatch.setattr(F, "linear", unsteady)
    # What is known of plain products is kept.
    monkeypatch.setattr(row_rule, "_fewest_rows", row_rule._fewest_rows.__wrapped__)
    runner = runner_of(config, model)
    found = play(runner, GPT_PROMPTS * 3, 8, chunk=7)
    assert same(found[:5], [play(runner, [prompt], 8)[0] for prompt in GPT_PROMPTS])
    assert not same(found[:5], expected)
    for ours, other in zip(found, expected, strict=False):
        assert ours.tokens == other.tokens
        torch.testing.assert_close(ours.log_probs, other.log_probs, rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", [{}, {"llama": True}])
def test_packed_weights(kind, gpt_config, random_gpt, monkeypatch):
    config = gpt_config(**kind)
    model = random_gpt(config)
    expected = play(runner_of(config, model), GPT_PROMPTS, 8)
    monkeypatch.setattr(row_rule, "LEAST", 0)
    calls = []
    product = row_rule.packed_linear
    counted = lambda *args: calls.append(args) or product(*args)  # noqa: E731
    monkeypatch.setattr(row_rule, "packed_linear", counted)
    runner = runner_of(config, model)
    crowd = play(runner, GPT_PROMPTS, 8, chunk=3)
    assert calls
    assert same(crowd, [play(runner, [prompt], 8)[0] for prompt in GPT_PROMPTS])
    for ours, other in zip(crowd, expected, strict=True):
        assert ours.tokens == other.tokens
        torch.testing.assert_close(ours.log_probs, other.log_probs, rtol=0, atol=5e-6)


def test_widths_that_are_no_multiple_of_a_vector(gpt_config, random_gpt):
    """Elementwise kernels compute the end of a tensor by other code."""
    config = gpt_config(llama=True, ffn_hidden_size=45)
    runner = runner_of(config, random_gpt(config))
    crowd = play(runner, GPT_PROMPTS, 8, chunk=3)
    assert same(crowd, [play(runner, [prompt], 8)[0] for prompt in GPT_PROMPTS])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits(dtype, gpt_config, random_gpt):
    config = gpt_config(llama=True)
    exact = play(runner_of(config, random_gpt(config)), GPT_PROMPTS, 1)
    found = play(runner_of(config, random_gpt(config).to(dtype)), GPT_PROMPTS, 1)
    for ours, other in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.log_probs, other.log_probs, rtol=0, atol=0.1)


def test_long_sequences_have_other_frequencies(gpt_config, random_gpt):
    """LongRoPE: the length of each sequence decides, and not that of another in its step."""
    scaling = {
        "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 8,
    }  # fmt: skip
    config = gpt_config(llama=True, rope_scaling=json.dumps(scaling))
    model = random_gpt(config)
    runner = runner_of(config, model)
    assert runner.long_after == 8
    short, long = tuple(range(6)), tuple(range(20, 32))
    parts = (
        SequencePart(short, 0, (0, 1), logits=True),
        SequencePart(long[:5], 0, (2, 3), long=True),
    )
    first = runner.run(StepInput(parts)).logits_RV[0]
    last = runner.run(
        StepInput((SequencePart(long[5:], 5, (2, 3, 4), logits=True, long=True),))
    ).logits_RV[0]
    for found, tokens in ((first, short), (last, long)):
        with torch.inference_mode():
            expected = forward(model, torch.tensor([tokens]))[0, -1, :61]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_family_that_does_not_generate_is_refused(gpt_config):
    config = gpt_config()
    bert = dataclasses.replace(config, model=dataclasses.replace(config.model, family="bert"))
    with pytest.raises(ConfigError, match="the family bert does not generate text"):
        opening.runner_of(SimpleNamespace(config=bert, mesh=Mesh()), None, CacheConfig())
