"""Collectives that know their own gradient, each with its group as an argument."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.groups import Group


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # A gradient may belong to other branches of the graph too, so the sum is taken in a copy.
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group.handle)
        return grad, None


class _ReduceFromRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group.handle)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def copy_to_ranks(x: Tensor, group: Group) -> Tensor:
    """Enters a tensor-parallel region: identity forward, gradients summed over ``group``."""
    return x if group.size == 1 else _CopyToRanks.apply(x, group)


def reduce_from_ranks(x: Tensor, group: Group) -> Tensor:
    """Leaves a tensor-parallel region: sum over ``group`` forward, identity backward."""
    return x if group.size == 1 else _ReduceFromRanks.apply(x, group)


def gather_last_dim(x: Tensor, group: Group) -> Tensor:
    """The shares of all ranks of ``group`` side by side along the last dimension; no gradient."""
    if group.size == 1:
        return x
    x = x.contiguous()
    shares = [torch.empty_like(x) for _ in range(group.size)]
    dist.all_gather(shares, x, group=group.handle)
    return torch.cat(shares, dim=-1)
