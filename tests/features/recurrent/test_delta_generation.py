"""Generation of Qwen3-Next: texts of transformers and of the whole pass, the same bits in any
company."""

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
LONG = [1 + n * 7 % 60 for n in range(150)]
"""Over several chunks; without token 0, which is padding for transformers."""
_SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 200,
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 6, "tie_word_embeddings": False,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
_EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 24,
}  # fmt: skip
MODELS = {"qwen3_next": _SIZES | _EXPERTS, "qwen3_5_text": _SIZES}
SOME = ["qwen3_next", pytest.param("qwen3_5_text", marks=pytest.mark.proof)]


@pytest.fixture(params=SOME)
def theirs(request, monkeypatch):
    monkeypatch.setitem(SHAPES, request.param, MODELS[request.param])
    return request.param


@pytest.fixture
def made(theirs, tmp_path):
    """Makes a runner of their model in a dtype, and our model."""

    def make(dtype):
        source = HuggingFaceFolder(save_theirs(tmp_path / "theirs", theirs))
        model = model_of(source, dtype, torch.device("cpu"))
        generation = family_of("gpt").generation(run_config(model=source.model), None)
        stages = StagedLayers.alone(model, source.model.hidden_size)
        return PagedRunner(stages, source.model, generation, 120, 4, slots=8), model

    return make


def test_greedy_against_transformers(theirs, made):
    """Texts of several lengths under way together, one over several chunks."""
    prompts = [LONG, *PROMPTS[:4]]
    texts = play(made(torch.float32)[0], prompts, COUNT, chunk=64, together=3)
    for text, prompt in zip(texts, prompts, strict=True):
        tokens, log_probs = their_greedy(their_model(theirs), prompt, COUNT)
        assert text.tokens == tokens
        torch.testing.assert_close(text.log_probs, log_probs, rtol=0, atol=3e-5)
    assert len({tuple(text.tokens) for text in texts}) > 2


@pytest.mark.proof
def test_token_by_token_equals_the_whole_pass(made):
    """In float64, but that a runner's log-probabilities are float32."""
    runner, model = made(torch.float64)
    for text in play(runner, [LONG, *PROMPTS], COUNT, together=3):
        with torch.inference_mode():
            logits = forward(model, torch.tensor([text.prompt + text.tokens[:-1]]))[0, :, :61]
        log_probs = logits.log_softmax(-1)[len(text.prompt) - 1 :]
        torch.testing.assert_close(text.log_probs.double(), log_probs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.proof)]
)
def test_the_same_bits_alone_and_in_a_crowd(dtype, made):
    runner, _ = made(dtype)
    prompts = [LONG, *PROMPTS]
    crowd = play(runner, prompts, COUNT, together=8)
    alone = [play(runner, [prompt], COUNT, shuffled=False)[0] for prompt in prompts]
    assert same(crowd, alone)
    assert same(play(runner, prompts, COUNT, chunk=64, together=3), alone)
