"""Tokens of a layer of experts over the ranks that share its work.

Ranks that divide sequences route different tokens. So do tensor-parallel ranks where they have
slices of the sequence, or where the experts are not cut over them. Rows, copies of tokens, then go
to the ranks that have their experts, and come back, by one exchange each way.

Shapes: B batch, S sequence (of activations the part of this context rank), T tokens of a rank, R
rows, H hidden, X any width; t tensor-parallel ranks, P ranks of the exchange, E experts, L experts
of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.collectives import all_gather_flat
from megatron.parallel.context import Context
from megatron.parallel.mesh import SINGLE, Group
from megatron.parallel.tensor_parallel import TensorParallel, sum_gradients


def all_rows(x_TX: Tensor, group: Group) -> Tensor:
    """Return the rows of all ranks, the same number from each, in the order of the ranks."""
    x_TX = x_TX.contiguous()
    whole = x_TX.new_empty(group.size * len(x_TX), *x_TX.shape[1:])
    all_gather_flat(whole.view(-1), x_TX.view(-1), group=group.handle)
    return whole


class _OwnRows(torch.autograd.Function):
    """Return this rank's share of common rows, zero-padded; the backward pass gathers."""

    @staticmethod
    def forward(ctx: Any, x_TX: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.count = group, len(x_TX)
        share = -(-len(x_TX) // group.size)
        rows = x_TX[group.rank * share : (group.rank + 1) * share]
        missing = share - len(rows)
        return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_rows(grad, ctx.group)[: ctx.count], None


class _AllRows(torch.autograd.Function):
    """Return the first ``count`` rows of all ranks; the backward pass returns this rank's share of
    a gradient that is the same on every rank."""

    @staticmethod
    def forward(ctx: Any, x_TX: Tensor, count: int, group: Group) -> Tensor:
        ctx.group, ctx.share = group, len(x_TX)
        return all_rows(x_TX, group)[:count]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        first = ctx.group.rank * ctx.share
        rows = grad[first : first + ctx.share]
        missing = ctx.share - len(rows)
        rows = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows
        return rows, None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group.handle)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@dataclass(frozen=True)
class SharedTokens:
    """The tokens [B, S] of a micro batch over context and tensor-parallel ranks; each routes its
    own.

    Attributes:
        group: tensor-parallel ranks that route different tokens; of one rank where all route the
            same.
        sliced: whether a rank has a slice of every sequence, [B, S/t], and not a run of tokens.
        context: ranks that divide every sequence, before tensor-parallel ranks do.
    """

    samples: int
    length: int
    group: Group = SINGLE
    sliced: bool = False
    device: torch.device = torch.device("cpu")
    context: Context = Context()

    @property
    def count(self) -> int:
        """Number of tokens of the micro batch."""
        return self.samples * self.length

    @cached_property
    def samples_T(self) -> Tensor:
        """Sample of each token of this rank, int64; -1 for padding."""
        size, rank, length = self.group.size, self.group.rank, self.length // self.context.size
        if self.sliced:
            rows = torch.arange(self.samples, device=self.device)
            return rows.repeat_interleave(length // size)
        share = -(-self.samples * length // size)
        places = torch.arange(rank * share, (rank + 1) * share, device=self.device)
        return torch.where(places < self.samples * length, places // length, -1)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, without a gradient."""
        return self.total(x.detach())

    def total(self, x: Tensor) -> Tensor:
        """The sum over ranks, each of which uses it identically: the gradient of a rank's addend
        equals the gradient of the sum."""
        x = _Total.apply(x, self.group) if self.group.size > 1 else x
        return self.context.sum(x)

    @torch.no_grad()
    def gather(self, x_TX: Tensor) -> Tensor:
        """The values of all tokens of the micro batch, sample by sample and in the order of each
        sequence, without a gradient."""
        whole = x_TX.detach()
        if self.group.size > 1:
            whole = all_rows(whole, self.group)
            if self.sliced:
                parts = whole.unflatten(0, (self.group.size, self.samples, -1))
                whole = parts.transpose(0, 1).flatten(0, 2)
            whole = whole[: self.count // self.context.size]
        if self.context.size == 1:
            return whole
        return self.context.whole(whole.unflatten(0, (self.samples, -1)), 1).flatten(0, 1)

    def own(self, x_TX: Tensor) -> Tensor:
        """This rank's part of the result of :meth:`gather`; zeros for padding."""
        if self.context.size > 1:
            x_TX = self.context.take(x_TX.unflatten(0, (self.samples, -1)), 1).flatten(0, 1)
        if self.group.size == 1:
            return x_TX
        if self.sliced:
            slices = x_TX.unflatten(0, (self.samples, self.group.size, -1))
            return slices[:, self.group.rank].flatten(0, 1)
        return _OwnRows.apply(x_TX, self.group)


@dataclass(frozen=True)
class ExpertRanks:
    """Ranks that share the tokens and the experts of a layer."""

    tp: TensorParallel

    @property
    def cut(self) -> bool:
        """True if tensor-parallel ranks have a part of the inner width of every expert, and so need
        all tokens; otherwise each computes some of the tokens."""
        return self.tp.group.size > 1 and self.tp.experts == "cut"

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes of the mesh over which experts are divided."""
        return ("expert", "tensor") if self.tp.experts == "folded" else ("expert",)

    @property
    def exchange(self) -> Group:
        """The ranks that have different experts."""
        return self.tp.over(*self.axes)

    @property
    def shares_tokens(self) -> bool:
        """True if tensor-parallel ranks have the same activations but compute different tokens."""
        return self.tp.group.size > 1 and not self.cut and not self.tp.split

    @property
    def apart(self) -> bool:
        """True if tensor-parallel ranks route different tokens."""
        return self.tp.split or self.shares_tokens

    def tokens(self, x_BSH: Tensor) -> SharedTokens:
        """The tokens of activations, which are a slice of the sequence in a split region."""
        (samples, length), context = x_BSH.shape[:2], self.tp.context
        group = self.tp.group if self.apart else SINGLE
        length *= self.tp.slices * context.size
        return SharedTokens(samples, length, group, self.tp.split, x_BSH.device, context)

    def routed(self, x_BSH: Tensor) -> Tensor:
        """The tokens that this rank routes, [T, H]."""
        x_TH = x_BSH.flatten(0, 1)
        return _OwnRows.apply(x_TH, self.tp.group) if self.shares_tokens else x_TH

    def shared(self, *params: Tensor) -> tuple[Tensor, ...]:
        """Parameters that every rank applies to the tokens that it routes."""
        return sum_gradients(self.tp.group, *params) if self.apart else params

    def shared_experts(self, *params: Tensor) -> tuple[Tensor, ...]:
        """Parameters of experts that every rank applies to the tokens that it computes."""
        return params if self.tp.experts != "whole" else sum_gradients(self.tp.group, *params)

    def entering(self, x_TX: Tensor, samples: int) -> Tensor:
        """Convert values for the tokens that this rank routes into values for those it computes."""
        if not self.cut:
            return x_TX
        return self.tp.enter(x_TX.unflatten(0, (samples, -1))).flatten(0, 1)

    def chosen(self, x_TX: Tensor, samples: int) -> Tensor:
        """:meth:`entering` of integers, without a gradient."""
        if not (self.cut and self.tp.split):
            return x_TX
        parts = all_rows(x_TX, self.tp.group).unflatten(0, (self.tp.group.size, samples, -1))
        return parts.transpose(0, 1).flatten(0, 2)

    def leaving(self, y_TX: Tensor, like_BSH: Tensor) -> Tensor:
        """Outputs of the tokens that this rank computes, which are addends where experts are cut,
        as activations [B, S, X]."""
        samples, length = like_BSH.shape[:2]
        if self.cut:
            return self.tp.leave(y_TX.unflatten(0, (samples, -1)).contiguous())
        if self.shares_tokens:
            y_TX = _AllRows.apply(y_TX, samples * length, self.tp.group)
        return y_TX.unflatten(0, (samples, length))


class RowPlan:
    """Places of the rows of all ranks, from numbers that the host reads once.

    Attributes:
        sizes: number of rows of each of this rank's experts, from all ranks.
    """

    def __init__(self, counts_E: Tensor, group: Group) -> None:
        counts_PE = all_rows(counts_E[None], group).tolist()
        size, rank = group.size, group.rank
        each = len(counts_PE[0]) // size
        mine = counts_PE[rank]
        self.group = group
        self.sent = [sum(mine[p * each : (p + 1) * each]) for p in range(size)]
        received_PL = [row[rank * each : (rank + 1) * each] for row in counts_PE]
        self.received = [sum(row) for row in received_PL]
        self.sizes = [sum(row[n] for row in received_PL) for n in range(each)]
        # Rows arrive by rank and expert; GEMMs need them by expert.
        runs_LP = torch.tensor(received_PL).T
        starts = torch.tensor(received_PL).flatten().cumsum(0).view(size, each) - runs_LP.T
        lengths, first = runs_LP.flatten(), starts.T.flatten()
        into = lengths.cumsum(0) - lengths
        places = torch.arange(int(lengths.sum()))
        by_expert = places + (first - into).repeat_interleave(lengths)
        back = torch.empty_like(by_expert)
        back[by_expert] = places
        self.by_expert, self.by_rank = by_expert.to(counts_E.device), back.to(counts_E.device)


class _Transfer:
    """An exchange of rows that has begun."""

    def __init__(self, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Group):
        self.rows = rows.contiguous()
        self.result = rows.new_empty(sum(received), *rows.shape[1:])
        self._work = dist.all_to_all_single(
            self.result,
            self.rows,
            output_split_sizes=list(received),
            input_split_sizes=list(sent),
            group=group.handle,
            async_op=True,
        )

    def finish(self) -> Tensor:
        self._work.wait()
        return self.result


class _Begin(torch.autograd.Function):
    """Starts an exchange; what it returns is there after :class:`_End`. The gradient comes back in
    the opposite order, so that passes of other layers in between overlap with both."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, box: list[_Transfer], splits: Any) -> Tensor:
        sent, received, group = splits
        ctx.box = box
        box[:] = [_Transfer(rows, sent, received, group)]
        return box[0].result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.box.pop().finish(), None, None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arriving: Tensor, box: list[_Transfer], splits: Any) -> Tensor:
        ctx.box, ctx.splits = box, splits
        box.pop().finish()
        return arriving.view_as(arriving)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        sent, received, group = ctx.splits
        ctx.box[:] = [_Transfer(grad, received, sent, group)]
        return grad, None, None  # of this shape; _Begin returns the gradient that has arrived


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RX: Tensor, order_R: Tensor, back_R: Tensor) -> Tensor:
        ctx.save_for_backward(back_R)
        return x_RX.index_select(0, order_R)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (back_R,) = ctx.saved_tensors
        return grad.index_select(0, back_R), None, None


class RowExchange:
    """Rows on their way to the ranks of their experts: :meth:`arrive` waits for them,
    :meth:`back` returns what became of them.

    Args:
        rows_RH: by expert.
        counts_E: number of rows of each expert, on the device.

    Attributes:
        sizes: number of rows of each of this rank's experts, from all ranks.
    """

    def __init__(self, rows_RH: Tensor, counts_E: Tensor, group: Group) -> None:
        self._plan = plan = RowPlan(counts_E, group)
        self.sizes, self._splits = plan.sizes, (plan.sent, plan.received, group)
        self._box: list[_Transfer] = []
        # On a GPU the rows of dropped choices are last.
        self._rows = _Begin.apply(rows_RH[: sum(plan.sent)], self._box, self._splits)

    def arrive(self) -> Tensor:
        """The rows of this rank's experts, by expert: [R', H]."""
        rows = _End.apply(self._rows, self._box, self._splits)
        return _Permuted.apply(rows, self._plan.by_expert, self._plan.by_rank)

    def back(self, y_RH: Tensor) -> Tensor:
        """Outputs for the rows of :meth:`arrive` to the rows that were sent, [R, H]."""
        y_RH = _Permuted.apply(y_RH, self._plan.by_rank, self._plan.by_expert)
        box: list[_Transfer] = []
        sent, received, group = self._splits
        splits = received, sent, group
        return _End.apply(_Begin.apply(y_RH, box, splits), box, splits)
