"""Collectives that are started early and finished where their result is needed.

In a graph of torch's compiler, they are torch's functional collectives. These do not modify their
arguments, so a layer with collectives is one graph. The graph also keeps the program's order:
computation between start and finish overlaps with the collective.

Shapes: B batch, S sequence, of which each of t ranks has a slice of length S/t.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.mesh import Group

Finish = Callable[[], Tensor]
"""Function that waits for a collective and returns its result. Work before the call overlaps."""

# Before torch 2.13, only the right-hand names exist.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Collectives without side effects, which torch's compiler can include in a graph.
_TRACED = torch.ops._c10d_functional


class Graphs:
    """Treatment of collectives by torch's compiler.

    Attributes:
        between: whether collectives break graphs. CUDA graphs that contain them would record NCCL's
          streams, which is not tested.
        for_products: whether sequences are gathered and scattered in a form that the compiler can
          fuse with a GEMM. If it does not, this costs an extra copy.
    """

    between = for_products = False


def finds_products() -> bool:
    """Return whether the compiler looks for GEMMs to fuse with collectives in this graph."""
    return Graphs.for_products and traced()


def traced() -> bool:
    """Return whether the compiler includes the calling code's collectives in a graph."""
    return torch.compiler.is_compiling() and not Graphs.between


def after(x: Tensor, grad: Tensor) -> Tensor:
    """Return ``x`` with a dependency on ``grad``, for a collective of the backward pass. Without
    the dependency, a graph could run the collective in the forward pass and store its result."""
    if not traced():
        return x
    return torch.where(grad.flatten()[0].isnan(), x, x)


def start_all_reduce(x: Tensor, group: Group) -> Finish:
    """Start an all-reduce (sum) of contiguous ``x``, in place except within a compiled graph."""
    if traced():
        return partial(_TRACED.wait_tensor, _TRACED.all_reduce(x, "sum", group.name))
    work = dist.all_reduce(x, group=group.handle, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return x

    return finish


def start_gather(x: Tensor, group: Group) -> Finish:
    """Start an all-gather that concatenates the ranks' tensors along the first dimension."""
    x = x.contiguous()
    if traced():
        started = _TRACED.all_gather_into_tensor(x, group.size, group.name)
        return partial(_TRACED.wait_tensor, started)
    whole = x.new_empty(group.size * len(x), *x.shape[1:])
    work = all_gather_flat(whole.view(-1), x.view(-1), group=group.handle, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return whole

    return finish


def start_scatter(x: Tensor, group: Group) -> Finish:
    """Start a reduce-scatter (sum). The result is this rank's slice along the first dimension."""
    x = x.contiguous()
    if traced():
        started = _TRACED.reduce_scatter_tensor(x, "sum", group.size, group.name)
        return partial(_TRACED.wait_tensor, started)
    total = x.new_empty(len(x) // group.size, *x.shape[1:])
    work = reduce_scatter_flat(total.view(-1), x.view(-1), group=group.handle, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return total

    return finish


def start_gather_sequence(x: Tensor, group: Group) -> Finish:
    """Start an all-gather of slices [B, S/t, ...] to [B, S, ...]. No copy is made if B is 1."""
    finish = start_gather(x, group)
    if finds_products():
        return lambda: torch.cat(finish().chunk(group.size), 1)
    return lambda: finish().unflatten(0, (group.size, -1)).transpose(0, 1).flatten(1, 2)


def start_scatter_sequence(x: Tensor, group: Group) -> Finish:
    """Start a reduce-scatter (sum) of [B, S, ...]. The result is this rank's slice [B, S/t, ...].
    No copy is made if B is 1."""
    assert x.shape[1] % group.size == 0, (x.shape, group.size)
    if finds_products():
        return start_scatter(torch.cat(x.chunk(group.size, 1)), group)
    return start_scatter(x.unflatten(1, (group.size, -1)).transpose(0, 1).flatten(0, 1), group)


def start_sum_over_copies(x: Tensor, copies: int, group: Group) -> Finish:
    """Start summing flat ``x`` over each block of ``copies`` consecutive ranks of a group."""
    slots = x.new_zeros(group.size // copies, x.numel())
    mine = slots[group.rank // copies].copy_(x)
    finish_all = start_all_reduce(slots, group)

    def finish() -> Tensor:
        finish_all()
        return mine

    return finish
