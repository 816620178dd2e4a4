"""Generation with experts: the texts of the whole pass, and the same bits in any company."""

import pytest
import torch
from generation_models import PROMPTS, play, same
from gpt_forward import forward

from megatron.apps.generation.execution.row_rule import RowRule
from megatron.apps.generation.execution.runner import PagedRunner
from megatron.apps.generation.execution.stages import StagedLayers
from megatron.families import family_of
from megatron.features.experts.compute import padded_places

COUNT = 9
SHORT = [prompt for prompt in PROMPTS if len(prompt) < 20]
KINDS = {
    "softmax": {},
    "sigmoid": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp64",
        "moe_layer_freq": "[0,1,1]",
    },
    "float32": {
        "moe_router_score_function": "sigmoid",
        "moe_router_dtype": "fp32",
        "moe_layer_freq": "[0,1,1]",
    },
    "shared": {
        "moe_shared_expert_intermediate_size": 24,
        "moe_shared_expert_gate": True,
        "add_bias_linear": True,
    },
    "capacity": {"moe_expert_capacity_factor": 0.5},
    "deepspeed": {"moe_gate": "deepspeed", "moe_eval_capacity_factor": 0.1},
    "sparsemixer": {"moe_gate": "sparsemixer", "moe_latent_size": 16},
}


@pytest.fixture
def made(gpt_config, random_gpt):
    """Makes a runner of a kind, and its model."""

    def make(kind, dtype):
        experts = {"num_layers": 3, "num_experts": (6,), "moe_ffn_hidden_size": 20}
        config = gpt_config(llama=True, **experts | KINDS[kind])
        model = random_gpt(config).to(dtype)
        for block in model.blocks():
            bias = getattr(getattr(block.mlp, "router", None), "expert_bias", None)
            if bias is not None:
                bias.values = torch.linspace(-0.1, 0.1, 6)
        stages = StagedLayers.alone(model, config.model.hidden_size)
        generation = family_of("gpt").generation(config, None)
        return PagedRunner(stages, config.model, generation, 90, 4), model

    return make


def without_capacity(model):
    for block in model.blocks():
        if hasattr(block.mlp, "dropless"):
            block.mlp.part = block.mlp.dropless


@pytest.mark.parametrize("kind", KINDS)
def test_token_by_token_equals_the_whole_pass(kind, made):
    """In float64, in pieces; experts have no capacity in generation."""
    runner, model = made(kind, torch.float64)
    texts = play(runner, SHORT, COUNT, chunk=3, together=3)
    without_capacity(model)
    for text in texts:
        with torch.inference_mode():
            logits = forward(model, torch.tensor([text.prompt + text.tokens[:-1]]))[0, :, :61]
        log_probs = logits.log_softmax(-1)[len(text.prompt) - 1 :]
        torch.testing.assert_close(text.log_probs.double(), log_probs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.proof)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_alone_and_in_a_crowd(kind, dtype, made):
    runner, _ = made(kind, dtype)
    crowd = play(runner, SHORT, COUNT)
    alone = [play(runner, [prompt], COUNT, shuffled=False)[0] for prompt in SHORT]
    assert same(crowd, alone)
    assert same(play(runner, SHORT, COUNT, chunk=3, together=3), alone)


def test_rows_of_experts_are_padded_each_by_itself():
    places_R, sizes = padded_places([3, 0, 5], RowRule(spare=1).padded)
    assert sizes == [5, 0, 6]
    assert places_R.tolist() == [0, 1, 2, 5, 6, 7, 8, 9]
    rule = RowRule(32, 32, 1)  # all products have one number of rows
    assert {rule.padded(rows) for rows in range(34)} == {33}
