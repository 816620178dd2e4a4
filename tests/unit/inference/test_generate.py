"""Generation against the model without a cache, and against transformers."""

import pytest
import torch
from gpt_forward import forward
from transformers import AutoConfig, AutoModelForCausalLM

from megatron.formats.huggingface import architecture_of
from megatron.inference import KeyValueCache, Sampling, generate

GREEDY = Sampling(greedy=True)
PROMPTS = [[5, 7, 9], [1], [60, 2, 2, 2, 8, 9, 11], [4, 4, 4], [3]]
MODELS = {
    "gpt2": {},
    "llama": {"llama": True},
    "llama,kv_heads=2": {"llama": True, "num_query_groups": 2},
    "half_rotary": {"position_embedding_type": "rope", "rotary_percent": 0.5},
    "eager": {"attention_backend": "eager"},
    "alibi": {"position_embedding_type": "alibi", "embed_layernorm": True},
    "windows": {
        "llama": True,
        "sliding_window": 4,
        "window_attn_skip_freq": 2,
        "qk_layernorm": True,
        "attn_logit_softcapping": 2.0,
    },
    "narrow": {"position_embedding_offset": 2, "sliding_window": 3, "parallel_residual": True},
}


@pytest.fixture(params=MODELS)
def built(request, gpt_config, random_gpt):
    config = gpt_config(**MODELS[request.param])
    return random_gpt(config), config.model


@pytest.fixture
def gpt2(gpt_config, random_gpt):
    config = gpt_config()
    return random_gpt(config), config.model


@torch.inference_mode()
def without_cache(model, config, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        logits = forward(model, torch.tensor([tokens]))[0, -1, : config.vocabulary.size]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def test_against_no_cache(built):
    model, config = built
    found = generate(model, config, PROMPTS, 10, GREEDY)
    for prompt, continuation in zip(PROMPTS, found, strict=True):
        assert continuation.tokens == without_cache(model, config, prompt, 10)
        assert not continuation.ended
    assert len({tuple(continuation.tokens) for continuation in found}) > 1


@torch.inference_mode()
def test_cached_logits_in_pieces(built):
    """Positions fed in any pieces have the logits of one pass."""
    model, _ = built
    tokens = torch.arange(24).view(1, 24)
    expected = forward(model, tokens)
    cache = KeyValueCache(3)
    found, start = [], 0
    for width in (1, 5, 1, 9, 8):
        piece = slice(start, start + width)
        positions = torch.arange(start, start + width).view(1, -1)
        found.append(forward(model, tokens[:, piece], positions, cache=cache))
        start += width
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1.3e-6, atol=1e-5)


@pytest.mark.parametrize("llama", [False, True])
def test_greedy_against_transformers(llama, gpt_config, random_gpt, canonical):
    config = gpt_config(llama=llama, max_position_embeddings=64)
    model = random_gpt(config)
    architecture = architecture_of(config.model)
    content = architecture.config(config.model)
    content = {key: value for key, value in content.items() if key != "architectures"}
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**content, bos_token_id=None, eos_token_id=None)
    )
    state = dict(architecture.to_hf(config.model, canonical(model).__getitem__))
    theirs.load_state_dict(state, strict=False)
    found = generate(model, config.model, PROMPTS, 12, GREEDY)
    for prompt, continuation in zip(PROMPTS, found, strict=True):
        expected = theirs.eval().generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        assert continuation.tokens == expected[0, len(prompt) :].tolist()


def test_stops_at_the_end_of_the_document(gpt2):
    model, config = gpt2
    whole = generate(model, config, PROMPTS, 17, GREEDY)
    eod = whole[0].tokens[4]
    for before, after in zip(whole, generate(model, config, PROMPTS, 17, GREEDY, eod), strict=True):
        at = before.tokens.index(eod) if eod in before.tokens else None
        assert after.tokens == before.tokens[:at]
        assert after.ended == (at is not None)


def test_sampling_depends_on_seed_and_row_only(gpt2):
    model, config = gpt2
    sampling = Sampling(temperature=2.0, seed=3)
    found = generate(model, config, PROMPTS, 6, sampling)
    assert generate(model, config, PROMPTS, 6, sampling, batch_size=1) == found
    assert generate(model, config, PROMPTS[:2], 6, sampling) == found[:2]
    assert generate(model, config, PROMPTS, 6, Sampling(temperature=2.0, seed=4)) != found
    same = generate(model, config, [[5]] * 4, 6, sampling)
    assert len({tuple(continuation.tokens) for continuation in same}) == 4


def test_padding_of_the_vocabulary_is_never_drawn(gpt_config, random_gpt):
    config = gpt_config(vocab_size=3)
    assert config.model.vocabulary.padded == 128
    found = generate(random_gpt(config), config.model, [[0]] * 20, 20, Sampling(temperature=50.0))
    assert {token for continuation in found for token in continuation.tokens} == {0, 1, 2}


def test_tokens_are_reported_as_they_come(gpt2):
    model, config = gpt2
    reported = {number: [] for number in range(len(PROMPTS))}
    found = generate(
        model, config, PROMPTS, 9, GREEDY, eod=3, on_token=lambda n, t: reported[n].append(t)
    )
    assert [reported[n] for n in range(len(PROMPTS))] == [c.tokens for c in found]


def test_the_last_position_is_usable(built):
    model, config = built
    (found,) = generate(model, config, [[1, 2, 3]], 21, GREEDY)
    assert found.tokens == without_cache(model, config, [1, 2, 3], 21)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, 2, 3, 4], "prompt of 4 tokens is more than the model's 24 positions .*tokens 20"),
        ([1] * 24, "--max-position-embeddings.*shorten the prompt"),
        ([], "prompt 0 is empty"),
        ([61], "token id 61, outside the model's vocabulary of 61"),
        ([-1], "token id -1"),
    ],
)
def test_bad_prompts(prompt, message, gpt_config, random_gpt):
    config = gpt_config()
    with pytest.raises(ValueError, match=message):
        generate(random_gpt(config), config.model, [prompt], 21, GREEDY)


def test_bfloat16(gpt2):
    model, config = gpt2
    (found,) = generate(model.to(torch.bfloat16), config, [[1, 2]], 10, GREEDY)
    assert len(found.tokens) == 10
