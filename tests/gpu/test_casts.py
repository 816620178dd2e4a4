"""Kernels of casts to 8 bits on a GPU: the bits of their formulas there, and their time."""

import pytest
import torch
from gpu_runs import DEVICE, needs_gpu
from torch import Tensor
from torch.utils.benchmark import Timer

from megatron.features.float8 import mlp as fused
from megatron.features.float8.linear import NOTHING_KEPT, Float8, Kept
from megatron.features.float8.operators import casts, gated_casts
from megatron.model.mlp import MLP
from megatron.parallel.tensor_parallel import TensorParallel

pytestmark = needs_gpu
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [(4096, 1536), (80, 208), (16_384, 4608)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE).bfloat16()


def assert_same(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], share: float = 0.0) -> None:
    """Bit for bit but for a ``share`` of the numbers."""
    for left, right in zip(ours, theirs, strict=True):
        assert left.shape == right.shape and left.stride() == right.stride()
        same = (left.float() == right.float()) | (left.float().isnan() & right.float().isnan())
        assert float((~same).float().sum()) <= share * same.numel()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", SHAPES)
def test_casts_against_the_formula(shape, dtype):
    x = draw(*shape)
    limit = torch.finfo(dtype).max
    one = limit / x.abs().amax().float()
    lines = tuple(limit / x.abs().amax(dim).float() for dim in (1, 0))
    for factors, clamp in (((one, one), False), ((one * 4, one * 4), True), (lines, False)):
        for rows, columns in (factors, (factors[0], None), (None, factors[1])):
            args = (x, dtype, rows, columns, clamp, clamp)
            assert_same(casts._CAST_BOTH(*args), casts.cast_formula(*args))
    assert_same(casts._LARGEST_OF_LINES(x), casts._largest_of_lines(x))
    values = x.to(dtype).view(torch.uint8)
    assert torch.equal(casts._TRANSPOSED(values), values.t())
    if not any(size % 128 for size in shape):
        for squares in (False, True):
            args = (x, dtype, squares, True, True)
            assert_same(casts._CAST_BLOCKS(*args), casts._cast_blocks(*args))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_overflows_are_measured(value):
    x = draw(256, 384)
    x[130, 5] = value
    assert not casts._CAST_BOTH(x, E4M3, torch.ones((), device=DEVICE), None, True, True)[
        2
    ].isfinite()
    rows, columns = casts._LARGEST_OF_LINES(x)
    assert (~rows.isfinite()).nonzero().tolist() == [[130]]
    assert (~columns.isfinite()).nonzero().tolist() == [[5]]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("kind", ["swiglu", "geglu"])
def test_gated_casts_against_the_formula(kind, known):
    """But for a few numbers half-way between two of bfloat16: exponential functions differ."""
    x, grad, factor = (
        draw(1024, 2 * 8960),
        draw(1024, 8960, seed=1),
        torch.tensor(20.0, device=DEVICE),
    )
    args = (x, kind, E4M3, factor, known)
    assert_same(gated_casts.activated(*args), gated_casts._activated(*args), 1e-3)
    args = (x, grad, kind, E4M3, factor, E5M2, factor * 100 if known else None)
    assert_same(gated_casts.differentiated(*args), gated_casts._differentiated(*args), 1e-3)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_an_mlp_against_its_layers(recipe):
    from configs import model_config

    model = model_config(
        num_layers=2, hidden_size=512, ffn_hidden_size=1408, num_attention_heads=4, kv_channels=128,
        swiglu=True, add_bias_linear=False,
    )  # fmt: skip
    float8, mlp = Float8(True, recipe), MLP(model, TensorParallel()).to(DEVICE).bfloat16()
    for layer in (mlp.up, mlp.down):
        torch.nn.init.normal_(layer.weight, std=0.05)
        leaf = torch.tensor([4.0, 4.0], device=DEVICE, requires_grad=True)
        rows = float8.weight_rows(layer.weight, NOTHING_KEPT)
        delayed = recipe == "delayed"
        layer.kernel, layer.weight_kept = float8, Kept(rows, leaf if delayed else None, delayed)
    outcomes = []
    for forward in (MLP.forward.__get__(mlp), fused):
        if forward is fused:
            fused.fuse(mlp, model, float8)
            forward = mlp
        x = draw(2, 256, 512).requires_grad_()
        y = forward(x)
        outcomes.append(
            [y, *torch.autograd.grad(y, [x, *mlp.parameters()], draw(2, 256, 512, seed=2))]
        )
    for ours, layers in zip(*outcomes, strict=True):
        assert float((ours - layers).float().norm() / layers.float().norm()) < 0.06


def test_a_cast_takes_as_long_as_its_bytes():
    """Two bytes read and two written for a number: within half as long again as a copy of four."""
    x, factor = draw(16_384, 8960), torch.ones((), device=DEVICE)
    half = x.new_empty(16_384, 8960)

    def seconds(statement: str) -> float:
        names = {"cast": casts._CAST_BOTH, "x": x, "f": factor, "E": E4M3, "half": half}
        return Timer(statement, globals=names).blocked_autorange(min_run_time=0.5).median

    copy = seconds("half.copy_(x)")
    assert seconds("cast(x, E, f, f, False, False)") < 1.5 * copy
