"""Generation with the cache of latent vectors: texts of transformers and of the whole pass, the
same bits in any company, and the memory that it takes."""

import pytest
import torch
from configs import run_config
from generation_models import PROMPTS, SHAPES, play, same, save_theirs, their_greedy, their_model
from gpt_forward import forward

from megatron.apps.generation.execution.runner import PagedRunner
from megatron.apps.generation.execution.stages import StagedLayers
from megatron.families import family_of
from megatron.formats.huggingface.source import HuggingFaceFolder
from megatron.formats.inspection import model_of

COUNT = 9
SHORT = [prompt for prompt in PROMPTS if len(prompt) < 20]
LATENT, ROTATED = 16, 8
_SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 40,
    "q_lora_rank": 24, "kv_lora_rank": LATENT, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": ROTATED, "v_head_dim": 12, "tie_word_embeddings": False,
    "moe_intermediate_size": 20, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 2.5, "mscale": 0.8, "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 16,
}  # fmt: skip
MODELS = {
    "deepseek_v3": _SIZES | {"n_group": 1, "topk_group": 1, "rope_parameters": _YARN},
    "deepseek_v2": _SIZES | {"q_lora_rank": None, "v_head_dim": 22},
}
SOME = ["deepseek_v3", pytest.param("deepseek_v2", marks=pytest.mark.proof)]


@pytest.fixture(params=SOME)
def theirs(request, monkeypatch):
    monkeypatch.setitem(SHAPES, request.param, MODELS[request.param])
    return request.param


@pytest.fixture
def made(theirs, tmp_path):
    """Makes a runner of their model in a dtype, and our model."""

    def make(dtype, pages=60, page_size=4):
        source = HuggingFaceFolder(save_theirs(tmp_path / "theirs", theirs))
        model = model_of(source, dtype, torch.device("cpu"))
        generation = family_of("gpt").generation(run_config(model=source.model), None)
        stages = StagedLayers.alone(model, source.model.hidden_size)
        return PagedRunner(stages, source.model, generation, pages, page_size), model

    return make


def test_greedy_against_transformers(theirs, made):
    """Texts of several lengths under way together, prompts in pieces."""
    texts = play(made(torch.float32)[0], SHORT, COUNT, chunk=5, together=3)
    for text, prompt in zip(texts, SHORT, strict=True):
        tokens, log_probs = their_greedy(their_model(theirs), prompt, COUNT)
        assert text.tokens == tokens
        torch.testing.assert_close(text.log_probs, log_probs, rtol=0, atol=5e-6)
    assert len({tuple(text.tokens) for text in texts}) > 2


@pytest.mark.proof
def test_token_by_token_equals_the_whole_pass(made):
    """In float64, but that a runner's log-probabilities are float32."""
    runner, model = made(torch.float64)
    for text in play(runner, SHORT, COUNT, chunk=3, together=3):
        with torch.inference_mode():
            logits = forward(model, torch.tensor([text.prompt + text.tokens[:-1]]))[0, :, :61]
        log_probs = logits.log_softmax(-1)[len(text.prompt) - 1 :]
        torch.testing.assert_close(text.log_probs.double(), log_probs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.proof)]
)
def test_the_same_bits_alone_and_in_a_crowd(dtype, made):
    runner, _ = made(dtype)
    crowd = play(runner, SHORT, COUNT)
    alone = [play(runner, [prompt], COUNT, shuffled=False)[0] for prompt in SHORT]
    assert same(crowd, alone)
    assert same(play(runner, SHORT, COUNT, chunk=3, together=3), alone)


def test_a_token_takes_its_latents_alone(made):
    """L + R numbers a token and block, whatever the heads."""
    runner, model = made(torch.float32, pages=10)
    blocks, numbers = len(model.blocks()), LATENT + ROTATED
    shape = runner.memory.shape
    assert shape.bytes == runner.page_size * blocks * numbers * 4
    pools = {runner.memory.of(layer).untyped_storage() for layer in range(blocks)}
    assert sum(pool.nbytes() for pool in pools) == 10 * shape.bytes
