"""Collectives that are started early, and finished where their result is needed.

Inside a graph of torch's compiler they are torch's functional collectives: they change no argument,
so that a layer with them is one graph. There the order of a program is kept too: what stands
between start and finish overlaps with the collective.

Shapes: B batch, S sequence, a slice of it S/t long on each of t ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.mesh import Group

Finish = Callable[[], Tensor]
"""Waits for a collective and returns its result; work done before the call overlaps with it."""

# The names before torch 2.13.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Collectives without side effects, which torch's compiler takes into a graph.
_TRACED = torch.ops._c10d_functional


class Graphs:
    """Collectives in the graphs of the compiler.

    Attributes:
        between: they break graphs: those that become CUDA graphs would record NCCL's streams, which
            is not tested.
        for_products: sequences are gathered and scattered in the forms that the compiler looks for
            next to a product: a copy more, unless it joins both.
    """

    between = for_products = False


def finds_products() -> bool:
    """True within a graph in which the compiler looks for products next to collectives."""
    return Graphs.for_products and traced()


def traced() -> bool:
    """True where the compiler takes what is called into a graph."""
    return torch.compiler.is_compiling() and not Graphs.between


def after(x: Tensor, grad: Tensor) -> Tensor:
    """Return ``x``, for a collective of the backward pass with ``grad``. A graph that did not need
    ``grad`` for it would begin it in the forward pass and keep the result."""
    if not traced():
        return x
    return torch.where(grad.flatten()[0].isnan(), x, x)


def start_all_reduce(x: Tensor, group: Group) -> Finish:
    """Sums contiguous ``x`` over the ranks, in place except in a graph."""
    if traced():
        return partial(_TRACED.wait_tensor, _TRACED.all_reduce(x, "sum", group.name))
    work = dist.all_reduce(x, group=group.handle, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return x

    return finish


def start_gather(x: Tensor, group: Group) -> Finish:
    """The tensors of all ranks, one after another along the first dimension."""
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
    """This rank's part along the first dimension, of the sum over the ranks."""
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
    """The slices [B, S/t, ...] of all ranks as [B, S, ...]; without a copy when B is 1."""
    finish = start_gather(x, group)
    if finds_products():
        return lambda: torch.cat(finish().chunk(group.size), 1)
    return lambda: finish().unflatten(0, (group.size, -1)).transpose(0, 1).flatten(1, 2)


def start_scatter_sequence(x: Tensor, group: Group) -> Finish:
    """This rank's slice [B, S/t, ...] of the sum of all ranks' [B, S, ...]; without a copy when B
    is 1."""
    assert x.shape[1] % group.size == 0, (x.shape, group.size)
    if finds_products():
        return start_scatter(torch.cat(x.chunk(group.size, 1)), group)
    return start_scatter(x.unflatten(1, (group.size, -1)).transpose(0, 1).flatten(0, 1), group)


def start_sum_over_copies(x: Tensor, copies: int, group: Group) -> Finish:
    """Sums flat ``x`` over each ``copies`` neighbouring ranks; no group of their own is needed."""
    slots = x.new_zeros(group.size // copies, x.numel())
    mine = slots[group.rank // copies].copy_(x)
    finish_all = start_all_reduce(slots, group)

    def finish() -> Tensor:
        finish_all()
        return mine

    return finish
