"""An MLP as one function of 8-bit products, as a GPU runs it, on a CPU by the formulas of its
operators."""

import functools

import pytest
import torch
import torch.nn.functional as F
from configs import model_config
from torch import Tensor

from megatron.features.float8 import mlp as fused
from megatron.features.float8.linear import NOTHING_KEPT, Float8, Kept
from megatron.features.float8.operators import casts
from megatron.model.mlp import MLP
from megatron.parallel.later_products import products_later
from megatron.parallel.tensor_parallel import TensorParallel

HIDDEN, INNER, TOKENS = 64, 96, 64
SHAPE = {
    "num_layers": 2, "hidden_size": HIDDEN, "ffn_hidden_size": INNER, "num_attention_heads": 4,
    "num_query_groups": 4, "kv_channels": 16, "seq_length": 32, "max_position_embeddings": 32,
    "padded_vocab_size": 64, "unpadded_vocab_size": 64, "swiglu": True, "add_bias_linear": False,
}  # fmt: skip
RECIPES = pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    for module in (fused, casts):
        monkeypatch.setattr(module, "uses", lambda name, x: True)


def build(recipe: str, **shape: object) -> MLP:
    """Fused where that is possible."""
    model, float8 = model_config(**SHAPE | shape), Float8(True, recipe)
    mlp = MLP(model, TensorParallel()).bfloat16()
    generator = torch.Generator().manual_seed(0)
    for param in mlp.parameters():
        torch.nn.init.normal_(param, std=0.1, generator=generator)
    for layer, largest in ((mlp.up, (4.0, 8.0)), (mlp.down, (8.0, 4.0))):
        leaf = torch.tensor(largest, requires_grad=True) if recipe == "delayed" else None
        layer.kernel = float8
        rows = float8.weight_rows(layer.weight, NOTHING_KEPT)
        layer.weight_kept = Kept(rows, leaf, recipe == "delayed")
    fused.fuse(mlp, model, float8)
    return mlp


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(2, TOKENS // 2, HIDDEN, generator=generator) for _ in range(2))
    return x.bfloat16().requires_grad_(), grad.bfloat16()


def results(mlp: MLP, forward=None) -> list[Tensor]:
    """Output, gradients of the input and of the weights, and measured magnitudes."""
    x, grad = inputs()
    leaves = [layer.weight_kept.largest for layer in (mlp.up, mlp.down)]
    leaves = [leaf for leaf in leaves if leaf is not None]
    y = (forward or mlp)(x)
    return [y, *torch.autograd.grad(y, [x, mlp.up.weight, mlp.down.weight, *leaves], grad)]


def is_fused(mlp: MLP) -> bool:
    return isinstance(mlp, fused.Float8MLP)


@RECIPES
def test_against_float64(recipe):
    """Its errors are those of separate layers; the magnitudes are the same."""
    mlp = build(recipe)
    assert is_fused(mlp)
    x, grad = (each.detach().double() for each in inputs())
    exact = [
        each.requires_grad_() for each in (x, *(p.detach().double() for p in mlp.parameters()))
    ]
    gate, up = (exact[0] @ exact[1].t()).chunk(2, -1)
    y = (F.silu(gate) * up) @ exact[2].t()
    expected = [y, *torch.autograd.grad(y, exact, grad)]
    ours, layers = results(mlp), results(mlp, functools.partial(MLP.forward, mlp))
    assert not torch.equal(ours[1], layers[1]), "the activation is rounded once"
    for one, other, right in zip(ours[:4], layers[:4], expected, strict=True):
        errors = [float((each.double() - right).norm() / right.norm()) for each in (one, other)]
        assert errors[0] < 1.1 * errors[1] and errors[0] < 0.25
        assert one.dtype == torch.bfloat16
    for one, other in zip(ours[4:], layers[4:], strict=True):
        torch.testing.assert_close(one, other, rtol=2**-6, atol=0)


@RECIPES
def test_gate_and_up_are_kept_and_no_activation(recipe):
    mlp, saved = build(recipe), []
    x, _ = inputs()
    known = {each.data_ptr() for layer in (mlp.up, mlp.down) for each in layer.weight_kept.weight}
    known |= {param.data_ptr() for param in mlp.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        mlp(x)
    own = [tensor for tensor in saved if tensor.data_ptr() not in known]
    large = {(tensor.dtype, tensor.numel()) for tensor in own if tensor.numel() > 2}
    assert large == {
        (torch.bfloat16, TOKENS * 2 * INNER), (torch.float8_e4m3fn, TOKENS * HIDDEN),
    }  # fmt: skip


@RECIPES
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_overflows_are_seen(recipe, value):
    """In the input, and in a gradient."""
    mlp = build(recipe)
    x, grad = inputs()
    with torch.no_grad():
        broken = x.clone()
        broken[0, 3, 5] = value
        assert mlp(broken)[0, 3].isnan().all()
    grad[0, 3, 5] = value
    y = mlp(x)
    for of_param in torch.autograd.grad(y, [x, *mlp.parameters()], grad):
        assert not of_param.isfinite().all()


@pytest.mark.parametrize(
    "other",
    [
        {"swiglu": False},
        {"add_bias_linear": True},
        {"swiglu": False, "quick_geglu": True, "glu_linear_offset": 1.0},
    ],
)
def test_other_mlps_stay_as_they_are(other):
    assert not is_fused(build("tensorwise", **other))


def test_layers_run_by_themselves_where_one_function_cannot(monkeypatch):
    """Without kept weights, with a frozen one, with products for later, and off a GPU."""
    mlp, calls = build("tensorwise"), []
    monkeypatch.setattr(MLP, "forward", lambda self, x: calls.append(len(calls)) or x)
    x, _ = inputs()
    mlp(x)
    assert calls == []
    with products_later([]):
        mlp(x)
    kept, mlp.up.weight_kept = mlp.up.weight_kept, None
    mlp(x)
    mlp.up.weight_kept = kept
    mlp.up.weight.requires_grad_(False)
    mlp(x)
    mlp.up.weight.requires_grad_(True)
    monkeypatch.setattr(fused, "uses", lambda name, x: False)
    mlp(x)
    assert calls == [0, 1, 2, 3]


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_scales_of_lines_stay_with_their_layers(recipe):
    model = model_config(**SHAPE)
    mlp = MLP(model, TensorParallel())
    fused.fuse(mlp, model, Float8(True, recipe))
    assert not is_fused(mlp)
