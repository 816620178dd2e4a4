"""Norms and MLPs against torch's own layers, their formulas and transformers' modules."""

from types import MethodType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from configs import model_config
from transformers.activations import ACT2FN, XIELUActivation
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from megatron.config.blocks import MLP_ACTIVATIONS, NORMS
from megatron.model.mlp import MLP
from megatron.model.norm import build_norm
from megatron.parallel.shard import init_of
from megatron.parallel.tensor_parallel import TensorParallel

GPT_OSS = SimpleNamespace(alpha=1.702, limit=0.7)
GPT_OSS._apply_gate = MethodType(GptOssExperts._apply_gate, GPT_OSS)
"""The gate of gpt-oss's experts, whose gate and up channels alternate."""


def randomise(module):
    torch.manual_seed(0)
    for param in module.parameters():
        torch.nn.init.normal_(param)
    return module.double()


def norm_of_torch(name, epsilon):
    """The norm of torch, or torch's with fewer parameters, for 8 channels."""
    kind = getattr(torch.nn, name.removeprefix("Unbiased").removeprefix("Plain"))
    fewer = {"bias": False} if name.startswith("Unbiased") else {}
    return kind(8, epsilon, not name.startswith("Plain"), **fewer).double()


@pytest.mark.parametrize("name", NORMS)
def test_norm_against_torch(name):
    config = model_config(hidden_size=8, normalization=name, norm_epsilon=1e-3)
    norm = randomise(build_norm(config, TensorParallel()))
    assert (norm.bias is not None) == NORMS[name].biased
    assert (norm.weight is not None) == NORMS[name].weighted
    reference = norm_of_torch(name, 1e-3)
    reference.load_state_dict(norm.state_dict())
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    torch.testing.assert_close(norm(x), reference(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name, traits in NORMS.items() if traits.weighted])
def test_weight_from_zero_against_its_formula(name):
    """Megatron's layernorm_1p: 1 + weight, gradients too."""
    config = model_config(hidden_size=8, normalization=name, apply_layernorm_1p=True)
    norm = randomise(build_norm(config, TensorParallel()))
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    reference = norm_of_torch(name, config.norm.norm_epsilon)
    values = {n: p.detach() + (n == "weight") for n, p in norm.named_parameters()}
    reference.load_state_dict(values)
    found, expected = norm(x), reference(x)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    draw = torch.randn_like(found)
    ours = torch.autograd.grad((found * draw).sum(), [x, *norm.parameters()])
    theirs = torch.autograd.grad((expected * draw).sum(), [x, *reference.parameters()])
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    assert float(init_of(norm.weight).constant) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("module", [Gemma2RMSNorm, Gemma3RMSNorm])
def test_weight_from_zero_against_transformers(module, dtype):
    """In bfloat16 1 + 0.001 would be 1."""
    config = model_config(
        hidden_size=64, normalization="RMSNorm", apply_layernorm_1p=True, norm_epsilon=1e-6
    )
    norm, theirs = build_norm(config, TensorParallel()).to(dtype), module(64).to(dtype)
    with torch.no_grad():
        theirs.weight.copy_(torch.full((64,), 0.001))
        norm.weight.copy_(theirs.weight)
    x = torch.randn(64, 64).to(dtype) * 3
    found, expected = norm(x), theirs(x)
    assert found.dtype == dtype
    if dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(found, expected)


def test_norm_of_heads_against_transformers():
    config = model_config(kv_channels=8, hidden_size=32, normalization="RMSNorm", norm_epsilon=1e-6)
    norm, theirs = (
        randomise(build_norm(config, TensorParallel(), heads=True)),
        Qwen3RMSNorm(8).double(),
    )
    theirs.load_state_dict(norm.state_dict())
    x_BSND = torch.randn(2, 5, 4, 8).double()
    torch.testing.assert_close(norm(x_BSND), theirs(x_BSND), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", NORMS)
def test_norms_keep_the_dtype_of_activations(name):
    """Heads are bfloat16 under autocast, whose weights are not."""
    config = model_config(hidden_size=8, kv_channels=8, normalization=name)
    for heads in (False, True):
        norm = build_norm(config, TensorParallel(), heads)
        if norm.weight is not None:
            torch.nn.init.ones_(norm.weight)
        x = torch.randn(3, 8)
        with torch.autocast("cpu", torch.bfloat16):
            assert norm(x.bfloat16()).dtype == torch.bfloat16
            assert norm(x).dtype == torch.float32


ACTIVATIONS = [
    ({}, lambda x: F.gelu(x, approximate="tanh")),
    ({"bias_gelu_fusion": False}, F.gelu),
    ({"squared_relu": True}, lambda x: F.relu(x) ** 2),
    ({"relu": True}, F.relu),
    ({"glu_activation": "geglu_erf"}, lambda x: F.gelu(x[..., :24]) * x[..., 24:]),
    ({"glu_activation": "geglu"}, lambda x: F.gelu(x[..., :24], approximate="tanh") * x[..., 24:]),
    ({"glu_activation": "swiglu"}, lambda x: F.silu(x[..., :24]) * x[..., 24:]),
    ({"quick_geglu": True}, lambda x: ACT2FN["quick_gelu"](x[..., :24]) * x[..., 24:]),
    (
        {"quick_geglu": True, "glu_linear_offset": 1.0, "activation_func_clamp_value": 0.7},
        lambda x: GPT_OSS._apply_gate(x.unflatten(-1, (2, 24)).transpose(-1, -2).flatten(-2)),
    ),
    (
        {"swiglu": True, "activation_func_clamp_value": 0.7},
        lambda x: F.silu(x[..., :24].clamp(max=0.7)) * x[..., 24:].clamp(-0.7, 0.7),
    ),
    (
        {"glu_activation": "geglu", "glu_linear_offset": -0.5},
        lambda x: F.gelu(x[..., :24], approximate="tanh") * (x[..., 24:] - 0.5),
    ),
    ({"swiglu": True}, lambda x: F.silu(x[..., :24]) * x[..., 24:]),
    ({"glu_activation": "squared_reglu"}, lambda x: F.relu(x[..., :24]) ** 2 * x[..., 24:]),
    ({"xielu": True}, XIELUActivation(dtype=torch.float64)),
]


def test_every_activation_is_compared():
    compared = {model_config(**flags).mlp.activation for flags, _ in ACTIVATIONS}
    assert compared == set(MLP_ACTIVATIONS)


@pytest.mark.parametrize("flags, activation", ACTIVATIONS, ids=[str(f) for f, _ in ACTIVATIONS])
@pytest.mark.parametrize("bias", [True, False])
def test_mlp_against_its_formula(flags, activation, bias):
    config = model_config(
        num_layers=2, hidden_size=8, ffn_hidden_size=24, add_bias_linear=bias, **flags
    )
    mlp = randomise(MLP(config, TensorParallel()))
    if isinstance(activation, torch.nn.Module):  # with learned factors
        for name, param in mlp.activation.named_parameters():
            start, theirs = init_of(param).constant, getattr(activation, name)
            torch.testing.assert_close(torch.tensor([start]).double(), theirs.detach())
            param.data.copy_(theirs.detach())
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    inner = activation(F.linear(x, mlp.up.weight, mlp.up.bias))
    torch.testing.assert_close(mlp(x), F.linear(inner, mlp.down.weight, mlp.down.bias))
    assert (mlp.up.bias is not None) == bias == (mlp.down.bias is not None)
