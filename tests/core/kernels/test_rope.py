"""Rotation of the projection's rows: the operator's formula against the path without it."""

import itertools

import pytest
import torch
from torch import Tensor

from megatron.kernels.rope import PackedHeads, _turned, rope_, rope_backward, rotated
from megatron.model.rope import apply_rope

LENGTH, BATCH = 5, 2
LAYOUTS = {
    "grouped": (PackedHeads(6, 2, 8), 8),
    "as-many-keys": (PackedHeads(3, 3, 12), 12),
    "partial": (PackedHeads(4, 1, 16), 6),
    "gated": (PackedHeads(4, 2, 8, gated=True), 8),
    "interleaved": (PackedHeads(4, 2, 8, interleaved=True), 8),
    "gated-partial-interleaved": (PackedHeads(2, 1, 12, gated=True, interleaved=True), 4),
}


def tables(width: int, interleaved: bool, samples: int | None, dtype=torch.float32):
    """Cosines and sines of random angles, shared by samples or not."""
    shape = (LENGTH, 1) if samples is None else (samples, LENGTH, 1)
    angles = 6 * torch.rand(*shape, width // 2, dtype=dtype)
    both = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    return both.cos(), both.sin()


def projected(heads: PackedHeads, dtype: torch.dtype) -> Tensor:
    units = heads.queries * (1 + heads.gated) + 2 * heads.keys
    return torch.randn(BATCH, LENGTH, units * heads.width, dtype=dtype)


def today(packed: Tensor, cos: Tensor, sin: Tensor, heads: PackedHeads) -> tuple[Tensor, ...]:
    q, k, v, gate = heads.views(packed)
    q, k = (apply_rope(x, cos, sin, heads.interleaved) for x in (q, k))
    return tuple(x for x in (q, k, v, gate) if x is not None)


@pytest.mark.parametrize("samples", [None, 1, BATCH])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_formula_equals_the_path_without_it(layout, dtype, samples):
    """Bit for bit, with the gradient of the projection's output."""
    torch.manual_seed(0)
    heads, width = LAYOUTS[layout]
    packed = projected(heads, dtype).requires_grad_()
    cos, sin = tables(width, heads.interleaved, samples)
    expected = today(packed, cos, sin, heads)
    grads = [torch.randn_like(x) for x in expected]
    before = packed.detach().clone()
    ours = tuple(x for x in rotated(packed, cos, sin, heads) if x is not None)
    assert torch.equal(packed, before)
    for ours_of, theirs in zip(ours, expected, strict=True):
        assert torch.equal(ours_of, theirs)
    (theirs,) = torch.autograd.grad(expected, packed, grads)
    (mine,) = torch.autograd.grad(ours, packed, grads)
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_are_rounded_once(dtype):
    """By angles that are rounded as the path without the operator does."""
    heads, width = LAYOUTS["partial"]
    x = projected(heads, dtype)
    cos, sin = tables(width, False, None)
    q, *_ = rotated(x, cos, sin, heads)
    rounded = cos.to(dtype).float(), sin.to(dtype).float()
    assert torch.equal(q, apply_rope(heads.views(x.float())[0], *rounded).to(dtype))


def test_the_opposite_rotation_is_the_inverse():
    torch.manual_seed(0)
    cos, sin = tables(8, True, BATCH, torch.float64)
    x = torch.randn(BATCH, LENGTH, 3, 8, dtype=torch.float64)
    back = _turned(_turned(x, cos, sin, True), cos, sin, True, -1)
    torch.testing.assert_close(back, x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(layout):
    torch.manual_seed(0)
    heads, width = LAYOUTS[layout]
    packed = projected(heads, torch.float64).requires_grad_()
    angles = tables(width, heads.interleaved, BATCH, torch.float64)

    def results(packed):
        return tuple(x for x in rotated(packed, *angles, heads) if x is not None)

    assert torch.autograd.gradcheck(results, (packed,))


@pytest.mark.parametrize("gated, largest", list(itertools.product((False, True), repeat=2)))
def test_the_operators_agree_with_their_shapes(gated, largest):
    heads = PackedHeads(4, 2, 8, gated)
    cos, sin = tables(8, False, None)
    torch.library.opcheck(rope_, (projected(heads, torch.float32), cos, sin, *heads))
    q, k, v, gate = heads.views(projected(heads, torch.bfloat16))
    result, most = rope_backward(q, k, v, gate, cos, sin, False, largest)
    assert result.shape == (BATCH, LENGTH, (4 * (1 + gated) + 4) * 8)
    assert most.tolist() == [result.abs().max().item()] * largest
    torch.library.opcheck(rope_backward, (q, k, v, gate, cos, sin, False, largest))


def test_one_graph_and_no_copy():
    """A compiler rotates in the output of the product, as nothing else reads it."""
    heads = PackedHeads(4, 2, 8)
    cos, sin = tables(8, False, None)
    weight = torch.randn(16, 64, requires_grad=True)
    x = torch.randn(BATCH, LENGTH, 16)

    def loss(x: Tensor) -> Tensor:
        q, k, v, _ = rotated(x @ weight, cos, sin, heads)
        return (q.sum() + (k * v).sum()).square()

    (eager,) = torch.autograd.grad(loss(x), weight)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    (ours,) = torch.autograd.grad(compiled(x), weight)
    torch.testing.assert_close(ours, eager)
