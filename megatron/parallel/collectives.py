"""Collectives over a group that is an argument: started here and finished by the caller, or with
their own gradient. Shapes: B batch, S sequence, a slice of it S/t long on each of t ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.mesh import Group

Finish = Callable[[], Tensor]
"""Waits for a collective and gives its result; work done before the call runs beside it."""

# The names before torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def start_all_reduce(x: Tensor, group: Group) -> Finish:
    """Sums contiguous ``x`` over the ranks, in place."""
    work = dist.all_reduce(x, group=group.handle, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return x

    return finish


def start_gather_sequence(x: Tensor, group: Group) -> Finish:
    """The slices [B, S/t, ...] of all ranks as [B, S, ...]; without a copy when B is 1."""
    x = x.contiguous()
    slices = x.new_empty(group.size, *x.shape)
    work = _all_gather(slices.view(-1), x.view(-1), group=group.handle, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return slices.transpose(0, 1).flatten(1, 2)

    return finish


def start_scatter_sequence(x: Tensor, group: Group) -> Finish:
    """This rank's slice [B, S/t, ...] of the sum of all ranks' [B, S, ...]; without a copy when B
    is 1."""
    assert x.shape[1] % group.size == 0, (x.shape, group.size)
    slices = x.unflatten(1, (group.size, -1)).transpose(0, 1).contiguous()
    total = torch.empty_like(slices[0])
    work = _reduce_scatter(total.view(-1), slices.view(-1), group=group.handle, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return total

    return finish


def start_sum_over_copies(x: Tensor, copies: int, group: Group) -> Finish:
    """Sums flat ``x`` over each ``copies`` neighbouring ranks; no group of their own is needed."""
    slots = x.new_zeros(group.size // copies, x.numel())
    mine = slots[group.rank // copies].copy_(x)
    finish_all = start_all_reduce(slots, group)

    def finish() -> Tensor:
        finish_all()
        return mine

    return finish


class _ReduceFromRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.mark_dirty(x)
        return start_all_reduce(x, group)()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _ScatterToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return start_scatter_sequence(x, group)()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return start_gather_sequence(grad, ctx.group)(), None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(param.view_as(param) for param in params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=ctx.group.handle)
        sums = flat.split([grad.numel() for grad in grads])
        return None, *(total.view_as(grad) for total, grad in zip(sums, grads, strict=True))


def reduce_from_ranks(x: Tensor, group: Group) -> Tensor:
    """Sum over ``group`` forward, identity backward. Overwrites ``x``, which must be contiguous and
    needed by nothing else."""
    return _ReduceFromRanks.apply(x, group)


def scatter_to_ranks(x_BSH: Tensor, group: Group) -> Tensor:
    """This rank's slice of the sequence of the sum over ``group``; gathered backward."""
    return _ScatterToRanks.apply(x_BSH, group)


def sum_gradients(params: tuple[Tensor, ...], group: Group) -> tuple[Tensor, ...]:
    """Identity forward; backward the gradients are summed over ``group``, all at once."""
    return _SumGradients.apply(group, *params)
