"""Norms, activations and rotary positions against torch's own layers and the papers' formulas."""

import pytest
import torch
import torch.nn.functional as F

from megatron.config import ModelConfig
from megatron.model.mlp import MLP
from megatron.model.norm import build_norm
from megatron.model.rope import apply_rope, rope_table
from megatron.parallel.region import TensorParallel

CPU = torch.device("cpu")


def randomise(module):
    torch.manual_seed(0)
    for param in module.parameters():
        torch.nn.init.normal_(param)
    return module.double()


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_norm_against_torch(name):
    config = ModelConfig(hidden_size=8, normalization=name, norm_epsilon=1e-3)
    norm = randomise(build_norm(config, TensorParallel()))
    reference = getattr(torch.nn, name)(8, eps=1e-3).double()
    reference.load_state_dict(norm.state_dict())
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    torch.testing.assert_close(norm(x), reference(x), rtol=0, atol=0)


ACTIVATIONS = [
    ({}, lambda x: F.gelu(x, approximate="tanh")),
    ({"bias_gelu_fusion": False}, F.gelu),
    ({"squared_relu": True}, lambda x: F.relu(x) ** 2),
    ({"swiglu": True}, lambda x: F.silu(x[..., :24]) * x[..., 24:]),
]


@pytest.mark.parametrize("flags, activation", ACTIVATIONS, ids=[str(f) for f, _ in ACTIVATIONS])
@pytest.mark.parametrize("bias", [True, False])
def test_mlp_against_its_formula(flags, activation, bias):
    config = ModelConfig(
        num_layers=2, hidden_size=8, ffn_hidden_size=24, add_bias_linear=bias, **flags
    )
    mlp = randomise(MLP(config, TensorParallel()))
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    inner = activation(F.linear(x, mlp.up.weight, mlp.up.bias))
    torch.testing.assert_close(mlp(x), F.linear(inner, mlp.down.weight, mlp.down.bias))
    assert (mlp.up.bias is not None) == bias == (mlp.down.bias is not None)


@pytest.mark.parametrize("rotated", [8, 4])
def test_rope_rotates_pairs_as_complex_numbers(rotated):
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    table = rope_table(5, rotated, 100.0, CPU)
    found = apply_rope(x, *table)
    half = rotated // 2
    pairs = torch.complex(x[..., :half], x[..., half:rotated])
    frequencies = 100.0 ** (-2 * torch.arange(half, dtype=torch.float64) / rotated)
    angles = torch.arange(5, dtype=torch.float64)[:, None] * frequencies
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat([turned.real, turned.imag, x[..., rotated:]], -1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # the table is float32


def test_rope_scores_depend_on_distance_only():
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 1, 8).double(), torch.randn(1, 1, 1, 8).double()
    cos, sin = rope_table(64, 8, 10000.0, CPU)

    def score(at_q, at_k):
        turned = [
            apply_rope(x, cos[at : at + 1], sin[at : at + 1]) for x, at in ((q, at_q), (k, at_k))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(9, 4) == pytest.approx(score(60, 55), abs=1e-5)
    assert abs(score(9, 4) - score(9, 5)) > 1e-3


def test_rope_table_outlives_inference_mode():
    rope_table.cache_clear()
    with torch.inference_mode():
        rope_table(4, 4, 10.0, CPU)
    x = torch.randn(1, 1, 4, 4, requires_grad=True)
    apply_rope(x, *rope_table(4, 4, 10.0, CPU)).sum().backward()
    assert x.grad is not None
