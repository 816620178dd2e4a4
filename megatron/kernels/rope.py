"""Rotary position embedding of queries and keys in the projection's output, where one row per token
contains queries, keys and values.

The forward pass rotates the heads in place, and returns queries, keys and values as views of the
row. Only the rotated channels are read and written, and nothing is stored twice for the backward
pass. The backward pass writes all gradients, rotated back, into one tensor: the gradient of the
projection's output.

Rotations are computed in float32 (float64 for float64 tensors) and rounded once. Cosines and sines
are first rounded to the dtype of the queries.

Shapes: B batch, S sequence, N query heads, K key heads, D head width, W = (N + 2K) D, or (2N + 2K)
D if each query's head is followed by its gate.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.kernels.operators import define


class PackedHeads(NamedTuple):
    """Layout of a row with queries, keys and values: numbers of heads, and the width of a head."""

    queries: int
    keys: int
    width: int
    gated: bool = False
    interleaved: bool = False

    def views(self, packed_BSW: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return views of queries, keys, values, and gates or None, each [B, S, heads, D]."""
        width = self.queries * self.width
        sizes = [width * (1 + self.gated), *[self.keys * self.width] * 2]
        q, k, v = (x.unflatten(-1, (-1, self.width)) for x in packed_BSW.split(sizes, dim=-1))
        if not self.gated:
            return q, k, v, None
        q, gate = q.unflatten(2, (-1, 2)).unbind(3)
        return q, k, v, gate


def rotated(
    packed_BSW: Tensor, cos: Tensor, sin: Tensor, heads: PackedHeads
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return rotated queries, rotated keys, values, and gates or None, each [B, S, heads, D].

    Args:
        packed_BSW: output of the projection. It is overwritten if torch's compiler can show that
          nothing else reads it, and copied otherwise.
        cos: cosines [S, 1, R] or [B, S, 1, R] for all R rotated channels, R <= D.
        sin: sines of the same shape.
        heads: layout of the rows.
    """
    views = _Rotated.apply(packed_BSW, cos, sin, heads)
    return views if heads.gated else (*views, None)  # type: ignore[no-any-return]


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, packed_BSW: Tensor, cos: Tensor, sin: Tensor, heads: PackedHeads
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = heads.interleaved
        # torch's compiler drops the copy if nothing else reads the tensor.
        packed_BSW = packed_BSW.clone(memory_format=torch.contiguous_format)
        rope_(packed_BSW, cos, sin, *heads)
        return tuple(x for x in heads.views(packed_BSW) if x is not None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        q, k, v, gate = grads if len(grads) == 4 else (*grads, None)
        packed_BSW, _ = rope_backward(q, k, v, gate, cos, sin, ctx.interleaved, False)
        return packed_BSW, None, None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: int = 1) -> Tensor:
    """Rotate the first R channels of each head, by the opposite angles if ``sign`` is -1."""
    kind = torch.promote_types(x.dtype, torch.float32)
    width = cos.shape[-1]
    cos, sin = (table.to(x.dtype).to(kind) for table in (cos, sign * sin))
    pairs = (-1, 2) if interleaved else (2, -1)
    of_pair = -1 if interleaved else -2
    first, second = x[..., :width].to(kind).unflatten(-1, pairs).unbind(of_pair)
    cos, sin = (table.unflatten(-1, pairs).select(of_pair, 0) for table in (cos, sin))
    both = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack(both, of_pair).flatten(-2).to(x.dtype)
    return torch.cat([turned, x[..., width:]], -1)


def _formula(
    packed_BSW: Tensor,
    cos: Tensor,
    sin: Tensor,
    queries: int,
    keys: int,
    width: int,
    gated: bool,
    interleaved: bool,
) -> None:
    q, k, _, _ = PackedHeads(queries, keys, width, gated).views(packed_BSW)
    for x in (q, k):
        x.copy_(_turned(x, cos, sin, interleaved))


def _backward_formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    largest: bool,
) -> tuple[Tensor, Tensor]:
    q, k = (_turned(x, cos, sin, interleaved, -1) for x in (q, k))
    if gate is not None:
        q = torch.stack([q, gate], 3)
    packed = torch.cat([x.flatten(2) for x in (q, k, v)], -1)
    if not largest:
        return packed, packed.new_empty(0, dtype=torch.float32)
    return packed, packed.abs().amax().to(torch.float32).view(1)


def _kernel(
    packed_BSW: Tensor,
    cos: Tensor,
    sin: Tensor,
    queries: int,
    keys: int,
    width: int,
    gated: bool,
    interleaved: bool,
) -> None:
    from megatron.kernels import rope_triton

    q, k, _, _ = PackedHeads(queries, keys, width, gated).views(packed_BSW)
    nothing = packed_BSW.new_empty(0, dtype=torch.float32)
    rope_triton.launch(q, k, None, None, packed_BSW, *_tables(cos, sin), interleaved, nothing)


def _backward_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    largest: bool,
) -> tuple[Tensor, Tensor]:
    from megatron.kernels import rope_triton

    packed, most = _backward_shapes(q, k, v, gate, cos, sin, interleaved, largest)
    q, k, v = (_with_channels_together(x) for x in (q, k, v))
    gate = None if gate is None else _with_channels_together(gate)
    rope_triton.launch(q, k, v, gate, packed, *_tables(cos, sin), interleaved, most.zero_())
    return packed, most


def _with_channels_together(x: Tensor) -> Tensor:
    """Return ``x``, or a copy if a kernel cannot read its pairs of channels as single words."""
    places = *x.stride()[:-1], x.storage_offset()
    return x if x.stride(-1) == 1 and not any(n % 2 for n in places) else x.contiguous()


def _tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines with equal strides."""
    cos, sin = (_with_channels_together(x) for x in (cos, sin))
    return cos, sin if sin.stride() == cos.stride() else torch.empty_like(cos).copy_(sin)


def _backward_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    largest: bool,
) -> tuple[Tensor, Tensor]:
    heads = q.shape[2] * (1 if gate is None else 2) + 2 * k.shape[2]
    packed = q.new_empty(*q.shape[:2], heads * q.shape[3])
    return packed, q.new_empty(int(largest), dtype=torch.float32)


rope_ = define(
    "rope_(Tensor(a!) packed, Tensor cos, Tensor sin, int queries, int keys, int width, "
    "bool gated, bool interleaved) -> ()",
    _formula,
    lambda *_: None,
    _kernel,
)
"""Operator that rotates the queries and keys in rows [B, S, W] in place."""

rope_backward = define(
    "rope_backward(Tensor q, Tensor k, Tensor v, Tensor? gate, Tensor cos, Tensor sin, "
    "bool interleaved, bool largest) -> (Tensor, Tensor)",
    _backward_formula,
    _backward_shapes,
    _backward_kernel,
)
"""Operator that computes the gradient [B, S, W] of the projection's output from the gradients of
rotated queries and keys, values and gates, [B, S, heads, D] with any strides. The second result is
the gradient's amax, float32 [1] with ``largest``, else empty."""
