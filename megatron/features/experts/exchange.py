"""Distribution of a layer's tokens over the ranks that share its experts. Context-parallel ranks
route different tokens. So do tensor-parallel ranks if they have slices of the sequence, or if
experts are not sharded across them. Rows, which are copies of tokens, are sent to the ranks of
their experts and back, with one all-to-all in each direction.

Shapes: B batch, S sequence (in activations this context rank's slice), T tokens of a rank, R rows,
H hidden, X any width; t tensor-parallel ranks, P ranks of the exchange, E experts, L experts of a
rank.
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
    """All-gather rows in rank order. All ranks must have the same number of rows."""
    x_TX = x_TX.contiguous()
    whole = x_TX.new_empty(group.size * len(x_TX), *x_TX.shape[1:])
    all_gather_flat(whole.view(-1), x_TX.view(-1), group=group.handle)
    return whole


class _OwnRows(torch.autograd.Function):
    """Return this rank's slice of rows that all ranks have, padded with zeros to equal lengths. The
    backward pass all-gathers the gradient."""

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
    """All-gather the rows of all ranks and keep the first ``count`` of the result. The gradient
    is the same on every rank, so the backward pass returns this rank's slice of it, padded with
    zeros."""

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
    """Tokens [B, S] of a micro batch, distributed over context and tensor-parallel ranks. Each rank
    routes its own tokens.

    Attributes:
        group: tensor-parallel ranks that route different tokens; a single rank if all route the
            same.
        sliced: True if a rank has a slice of every sequence, [B, S/t], and False if it has a
            contiguous run of the flattened tokens.
        context: context-parallel ranks, which divide every sequence before tensor-parallel ranks
            do.
    """

    samples: int
    length: int
    group: Group = SINGLE
    sliced: bool = False
    device: torch.device = torch.device("cpu")
    context: Context = Context()

    @property
    def count(self) -> int:
        """Number of tokens in the micro batch."""
        return self.samples * self.length

    @cached_property
    def samples_T(self) -> Tensor:
        """Index of the sample of each token of this rank, int64; -1 for padding."""
        size, rank, length = self.group.size, self.group.rank, self.length // self.context.size
        if self.sliced:
            rows = torch.arange(self.samples, device=self.device)
            return rows.repeat_interleave(length // size)
        share = -(-self.samples * length // size)
        places = torch.arange(rank * share, (rank + 1) * share, device=self.device)
        return torch.where(places < self.samples * length, places // length, -1)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over all ranks that share the micro batch, without a gradient."""
        return self.total(x.detach())

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over all ranks that share the micro batch. Every rank must use
        the result identically, because the backward pass passes its gradient on unchanged."""
        x = _Total.apply(x, self.group) if self.group.size > 1 else x
        return self.context.sum(x)

    @torch.no_grad()
    def gather(self, x_TX: Tensor) -> Tensor:
        """All-gather per-token values of the whole micro batch, sample by sample and in sequence
        order, without a gradient."""
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
        """Return this rank's slice of a result of :meth:`gather`, with zeros for padding."""
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
    """Process groups over which a layer's tokens and experts are distributed."""

    tp: TensorParallel

    @property
    def cut(self) -> bool:
        """True if the inner width of every expert is sharded across tensor-parallel ranks, so that
        each of them needs all tokens. Otherwise each rank computes only some of the tokens."""
        return self.tp.group.size > 1 and self.tp.experts == "cut"

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes of the mesh over which experts are distributed."""
        return ("expert", "tensor") if self.tp.experts == "folded" else ("expert",)

    @property
    def exchange(self) -> Group:
        """Group of ranks over which the experts of a layer are distributed."""
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
        """Return the distribution of the tokens of activations [B, S, H]; in a sequence-parallel
        region, S is a slice of the sequence."""
        (samples, length), context = x_BSH.shape[:2], self.tp.context
        group = self.tp.group if self.apart else SINGLE
        length *= self.tp.slices * context.size
        return SharedTokens(samples, length, group, self.tp.split, x_BSH.device, context)

    def routed(self, x_BSH: Tensor) -> Tensor:
        """Return the tokens that this rank routes, [T, H]."""
        x_TH = x_BSH.flatten(0, 1)
        return _OwnRows.apply(x_TH, self.tp.group) if self.shares_tokens else x_TH

    def shared(self, *params: Tensor) -> tuple[Tensor, ...]:
        """Return parameters that every rank applies to the tokens that it routes. If
        tensor-parallel ranks route different tokens, the parameters' gradients are summed."""
        return sum_gradients(self.tp.group, *params) if self.apart else params

    def shared_experts(self, *params: Tensor) -> tuple[Tensor, ...]:
        """Return parameters of experts that every rank applies to the tokens that it computes. If
        every tensor-parallel rank has the same experts, the parameters' gradients are summed."""
        return params if self.tp.experts != "whole" else sum_gradients(self.tp.group, *params)

    def entering(self, x_TX: Tensor, samples: int) -> Tensor:
        """Convert values of the tokens that this rank routes to values of the tokens that it
        computes."""
        if not self.cut:
            return x_TX
        return self.tp.enter(x_TX.unflatten(0, (samples, -1))).flatten(0, 1)

    def chosen(self, x_TX: Tensor, samples: int) -> Tensor:
        """Like :meth:`entering`, for integers, which have no gradient."""
        if not (self.cut and self.tp.split):
            return x_TX
        parts = all_rows(x_TX, self.tp.group).unflatten(0, (self.tp.group.size, samples, -1))
        return parts.transpose(0, 1).flatten(0, 2)

    def leaving(self, y_TX: Tensor, like_BSH: Tensor) -> Tensor:
        """Convert outputs of the tokens that this rank computes into activations [B, S, X]. If
        experts are sharded across tensor-parallel ranks, the outputs are partial sums, and are
        summed."""
        samples, length = like_BSH.shape[:2]
        if self.cut:
            return self.tp.leave(y_TX.unflatten(0, (samples, -1)).contiguous())
        if self.shares_tokens:
            y_TX = _AllRows.apply(y_TX, samples * length, self.tp.group)
        return y_TX.unflatten(0, (samples, length))


class RowPlan:
    """Split sizes and row orders of an exchange. The counts are copied to host memory only once."""

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
        # Rows arrive sorted by rank, then by expert. The GEMMs need them sorted by expert.
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
    """All-to-all exchange of rows that is in progress."""

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
    """Start an exchange. Its result is valid only after :class:`_End`. The backward passes run in
    reverse order, so that the computation in between overlaps with the exchange in either pass."""

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
        return grad, None, None  # only its shape matters: _Begin returns the received gradient


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
    """Exchange of rows with the ranks that own their experts. :meth:`arrive` waits for the rows,
    and :meth:`back` returns their outputs.

    Args:
        rows_RH: rows sorted by expert.
        counts_E: number of rows of each expert, on the device.

    Attributes:
        sizes: number of rows of each of this rank's experts, from all ranks.
    """

    def __init__(self, rows_RH: Tensor, counts_E: Tensor, group: Group) -> None:
        self._plan = plan = RowPlan(counts_E, group)
        self.sizes, self._splits = plan.sizes, (plan.sent, plan.received, group)
        self._box: list[_Transfer] = []
        # On a GPU the rows of dropped choices come last and are not sent.
        self._rows = _Begin.apply(rows_RH[: sum(plan.sent)], self._box, self._splits)

    def arrive(self) -> Tensor:
        """Wait for the rows of this rank's experts, and return them sorted by expert, [R', H]."""
        rows = _End.apply(self._rows, self._box, self._splits)
        return _Permuted.apply(rows, self._plan.by_expert, self._plan.by_rank)

    def back(self, y_RH: Tensor) -> Tensor:
        """Send the outputs of the rows that :meth:`arrive` returned back to the ranks that sent the
        rows. Return the outputs of this rank's own rows, [R, H]."""
        y_RH = _Permuted.apply(y_RH, self._plan.by_rank, self._plan.by_expert)
        box: list[_Transfer] = []
        sent, received, group = self._splits
        splits = received, sent, group
        return _End.apply(_Begin.apply(y_RH, box, splits), box, splits)
