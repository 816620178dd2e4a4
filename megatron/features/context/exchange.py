"""Exchanges of heads and of keys between the ranks that divide sequences.

All of them are collectives of the one context group, with empty parts for ranks that take no part.

Heads (Ulysses, Jacobs et al. 2023, arXiv:2309.14509): U neighbouring ranks, each with all N heads
of its tokens, get N / U heads each of the tokens of all of them. Keys (ring attention, Liu et al.
2023, arXiv:2310.01889): one step after another each rank gets the keys and values of another rank,
and the next ones travel while those of a step are used. Only halves that a query of the receiver
sees are sent, straight from their rank: under a causal mask three quarters of what would go round.

Shapes: P context ranks, U that exchange heads, R = P / U that exchange keys; B batch, N query
heads, K key heads, h heads of one rank or tensor, s tokens of a rank, w = s / 2 of a piece, S whole
sequence of U ranks or of all, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.collectives import Finish, start_gather, start_scatter, traced
from megatron.parallel.context import Context
from megatron.parallel.mesh import Group

Span = tuple[int, int]
"""Positions from the first to before the second."""

Spans = tuple[Span, ...]
"""Positions of the tokens of a tensor, in order."""


def spans_of(rank: int, size: int, length: int) -> Spans:
    """Positions of the tokens of one of ``size`` ranks in a sequence."""
    width = length // (2 * size)
    last = length - rank * width
    return (rank * width, (rank + 1) * width), (last - width, last)


def start_exchange(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Finish:
    """Sends ``sent`` rows of contiguous ``x`` to each rank; the ``received`` rows from each."""
    if traced():
        started = torch.ops._c10d_functional.all_to_all_single(
            x, list(received), list(sent), group.name
        )
        return partial(torch.ops._c10d_functional.wait_tensor, started)
    result = x.new_empty(sum(received), *x.shape[1:])
    work = dist.all_to_all_single(
        result,
        x,
        output_split_sizes=list(received),
        input_split_sizes=list(sent),
        group=group.handle,
        async_op=True,
    )

    def finish() -> Tensor:
        work.wait()
        return result

    return finish


class HeadExchange(NamedTuple):
    """The exchange of heads among ``size`` neighbours of a context."""

    context: Context
    size: int

    @property
    def rank(self) -> int:
        return self.context.rank % self.size

    def scatter_heads(
        self, q_BNsD: Tensor, k_BKtD: Tensor, v_BKtD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's query heads, [B, N / U, S, D], and the key and value heads that these use, of
        the tokens of all neighbours; in one collective. If U does not divide K, key heads are sent
        to every rank whose queries use them."""
        return _Heads.apply(self, q_BNsD, k_BKtD, v_BKtD)

    def gather_heads(self, y_BhSD: Tensor) -> Tensor:
        """All heads of this rank's tokens, [B, N, s, D]: the inverse for outputs."""
        return _Tokens.apply(self, y_BhSD)

    def key_heads(self, heads: int, key_heads: int) -> list[int] | None:
        """The key heads to send, neighbour by neighbour; None if each goes to a single one."""
        if key_heads % self.size == 0:
            return None
        group, each = heads // key_heads, heads // self.size
        # The most query heads that share a key head in every part of the heads.
        sharing = math.gcd(group, each)
        return [head // group for head in range(0, heads, sharing)]

    def to_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """[B, U h, s, D] each to [B, h, S, D]."""
        parts_UBhsD = [x.unflatten(1, (self.size, -1)).transpose(0, 1) for x in tensors]
        return [self._joined(part) for part in self._exchanged(parts_UBhsD)]

    def to_tokens(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """[B, h, S, D] each to [B, U h, s, D], neighbours in memory by token."""
        parts = self._exchanged([self._pieces(x) for x in tensors])
        return [part.permute(1, 3, 0, 2, 4).flatten(2, 3).transpose(1, 2) for part in parts]

    def _exchanged(self, parts_UX: Sequence[Tensor]) -> list[Tensor]:
        """Each tensor's slice for every neighbour to that from every neighbour."""
        flat = torch.cat([part.flatten(1) for part in parts_UX], 1)
        first = self.context.rank - self.rank
        counts = [0] * self.context.size
        counts[first : first + self.size] = [flat.shape[1]] * self.size
        received = start_exchange(flat.view(-1), counts, counts, self.context.group)().view_as(flat)
        slices = received.split([part[0].numel() for part in parts_UX], 1)
        return [x.reshape(part.shape) for x, part in zip(slices, parts_UX, strict=True)]

    def _joined(self, x_UBhsD: Tensor) -> Tensor:
        size, batch, heads, length, width = x_UBhsD.shape
        whole = x_UBhsD.new_empty(batch, heads, 2 * size, length // 2, width)
        for rank, part in enumerate(x_UBhsD.unflatten(3, (2, -1))):
            whole[:, :, rank], whole[:, :, -1 - rank] = part[:, :, 0], part[:, :, 1]
        return whole.flatten(2, 3)

    def _pieces(self, x_BhSD: Tensor) -> Tensor:
        pieces = x_BhSD.unflatten(2, (2 * self.size, -1))
        return torch.stack(
            [torch.cat((pieces[:, :, n], pieces[:, :, -1 - n]), 2) for n in range(self.size)]
        )


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: HeadExchange, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.key_heads = exchange, k.shape[1]
        ctx.sent = exchange.key_heads(q.shape[1], k.shape[1])
        if ctx.sent is not None:
            k, v = k[:, ctx.sent], v[:, ctx.sent]
        return tuple(exchange.to_heads((q, k, v)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.exchange.to_tokens(grads)
        if ctx.sent is not None:
            k, v = (_summed(x, ctx.sent, ctx.key_heads) for x in (k, v))
        return None, q, k, v


def _summed(x_BhsD: Tensor, heads: Sequence[int], count: int) -> Tensor:
    """Sums gradients of copies of ``count`` heads to gradients of the heads."""
    batch, _, length, width = x_BhsD.shape
    kind = torch.promote_types(x_BhsD.dtype, torch.float32)
    total = x_BhsD.new_zeros(batch, count, length, width, dtype=kind)
    for copy, head in enumerate(heads):
        total[:, head] += x_BhsD[:, copy]
    return total.to(x_BhsD.dtype)


class _Tokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, y: Tensor) -> Tensor:
        ctx.exchange = exchange
        return exchange.to_tokens((y,))[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, ctx.exchange.to_heads((grad,))[0]


class KeyBlock(NamedTuple):
    """Keys and values of positions ``spans``, [B, K, T, D]; only D must be contiguous."""

    k: Tensor
    v: Tensor
    spans: Spans


class KeySource(Protocol):
    """Source of the blocks of keys and values that queries attend to.

    The tensors ``k`` and ``v`` receive gradients, whatever they represent: a rank's tokens, or
    chunks in host memory. Both methods call ``visit`` with one block after another, in any order,
    at least with every block that a query attends to; while a block is visited the next one should
    be on its way. A block may be overwritten when ``visit`` has returned.
    """

    def forward(self, k: Tensor, v: Tensor, visit: Callable[[KeyBlock], None]) -> None: ...

    def backward(
        self, k: Tensor, v: Tensor, visit: Callable[[KeyBlock], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of ``k`` and ``v``, with their shapes and devices: sums of the
        gradients that ``visit`` returns, [B, K, T, D] for its block, in float32 or better."""
        ...


def gather(context: Context, k_BKsD: Tensor, v_BKsD: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of the whole sequence, [B, K, S, D], in one collective."""
    packed = _packed(k_BKsD, v_BKsD)
    parts = start_gather(packed, context.group)()
    first, second = parts.unflatten(0, (context.size, 2, -1)).unbind(1)
    return _unpacked(torch.cat((first.flatten(0, 1), second.flip(0).flatten(0, 1))))


def scatter_gradients(context: Context, k_BKSD: Tensor, v_BKSD: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's part [B, K, s, D] of the sums over the ranks; the transpose of gathering."""
    pieces = _packed(k_BKSD, v_BKSD).unflatten(0, (2 * context.size, -1))
    parts = torch.stack((pieces[: context.size], pieces[context.size :].flip(0)), 1)
    return _unpacked(start_scatter(parts.flatten(0, 2), context.group)())


def _packed(k_BKsD: Tensor, v_BKsD: Tensor) -> Tensor:
    """[s, 2, B, K, D], in memory: pieces of the sequence are contiguous."""
    return torch.stack((k_BKsD, v_BKsD)).permute(3, 0, 1, 2, 4).contiguous()


def _unpacked(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Views [B, K, s, D] of both."""
    k, v = packed.permute(1, 2, 3, 0, 4)
    return k, v


class Gathered(NamedTuple):
    """Keys and values of all ranks, gathered before use, and again for the backward pass."""

    context: Context
    length: int

    def forward(self, k: Tensor, v: Tensor, visit: Callable[[KeyBlock], None]) -> None:
        visit(KeyBlock(*gather(self.context, k, v), ((0, self.length),)))

    def backward(
        self, k: Tensor, v: Tensor, visit: Callable[[KeyBlock], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        grads = visit(KeyBlock(*gather(self.context, k, v), ((0, self.length),)))
        k_grad, v_grad = scatter_gradients(self.context, *grads)
        return k_grad.to(k.dtype), v_grad.to(v.dtype)


class _WholeKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, context: Context, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        ctx.context = context
        return gather(context, k, v)

    @staticmethod
    def backward(ctx: Any, k_grad: Tensor, v_grad: Tensor) -> tuple[None, Tensor, Tensor]:
        kind = torch.promote_types(k_grad.dtype, torch.float32)
        grads = scatter_gradients(ctx.context, k_grad.to(kind), v_grad.to(kind))
        return None, grads[0].to(k_grad.dtype), grads[1].to(v_grad.dtype)


def whole_keys(context: Context, k_BKsD: Tensor, v_BKsD: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of the whole sequence, kept for the backward pass."""
    return _WholeKeys.apply(context, k_BKsD, v_BKsD)


class Ring:
    """Keys and values of one rank after another, among ranks ``heads`` places apart: the ranks in
    between exchange heads.

    In step t a rank sends its own keys to the t-th rank after it. While a block is visited, the
    next step's block is transferred, and in the backward pass the last block's gradients are
    returned to its rank, in float32 or better.

    Args:
        sees: whether queries of some positions see any keys of others.
        queries: the length of the sequence of queries; ``keys`` is the length of the keys.
    """

    def __init__(
        self,
        context: Context,
        heads: int,
        sees: Callable[[Spans, Span], bool],
        queries: int,
        keys: int,
    ) -> None:
        self.context, self.heads = context, heads
        self.size = context.size // heads
        self.rank, self.first = divmod(context.rank, heads)
        ranks = range(self.size)
        self.keys = [spans_of(rank, self.size, keys) for rank in ranks]
        # The first piece of a source that a target sees, and the piece after the last. Every rank
        # knows all of them, and so the steps without a transfer.
        self.pieces = {
            (source, target): _range(
                [sees(spans_of(target, self.size, queries), span) for span in self.keys[source]]
            )
            for source in ranks
            for target in ranks
        }
        self.steps = [
            step
            for step in ranks[1:]
            if any(self.pieces[rank, (rank + step) % self.size] != (0, 0) for rank in ranks)
        ]

    def forward(self, k: Tensor, v: Tensor, visit: Callable[[KeyBlock], None]) -> None:
        for _, block in self._blocks(k, v):
            if block is not None:
                visit(block)

    def backward(
        self, k: Tensor, v: Tensor, visit: Callable[[KeyBlock], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        blocks = self._blocks(k, v)
        _, block = next(blocks)
        assert block is not None
        total = _packed(*visit(block))
        returned: Callable[[], None] | None = None
        for step, block in blocks:
            grads = total.new_empty(0) if block is None else _packed(*visit(block))
            if returned is not None:
                returned()
            returned = self._start_return(grads, step, total)
        if returned is not None:
            returned()
        k_grad, v_grad = _unpacked(total)
        return k_grad.to(k.dtype), v_grad.to(v.dtype)

    def _blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, KeyBlock | None]]:
        """Steps and their blocks, None where this rank sees nothing of one."""
        halves = _packed(k, v).unflatten(0, (2, -1)) if self.steps else k
        starts = [partial(self._start, halves, step) for step in self.steps]
        arriving = starts[0]() if starts else None
        yield 0, KeyBlock(k, v, self.keys[self.rank])
        for number, step in enumerate(self.steps):
            assert arriving is not None
            block = arriving()
            arriving = starts[number + 1]() if number + 1 < len(starts) else None
            yield step, block

    def _start(self, halves: Tensor, step: int) -> Callable[[], KeyBlock | None]:
        source, target = (self.rank - step) % self.size, (self.rank + step) % self.size
        first, end = self.pieces[self.rank, target]
        seen = slice(*self.pieces[source, self.rank])
        shape = (seen.stop - seen.start) * halves.shape[1], *halves.shape[2:]
        finish = self._start_exchange(halves[first:end], target, source, math.prod(shape))

        def arrived() -> KeyBlock | None:
            keys = finish().view(shape)
            return KeyBlock(*_unpacked(keys), self.keys[source][seen]) if len(keys) else None

        return arrived

    def _start_return(self, grads: Tensor, step: int, total: Tensor) -> Callable[[], None]:
        """Send gradients to the source of a step; the returned function adds the gradients of this
        rank's keys that its target sends."""
        source, target = (self.rank - step) % self.size, (self.rank + step) % self.size
        first, end = self.pieces[self.rank, target]
        part = total.unflatten(0, (2, -1))[first:end].flatten(0, 1)
        finish = self._start_exchange(grads, source, target, part.numel())

        def add() -> None:
            received = finish()
            part.add_(received.view_as(part))

        return add

    def _start_exchange(self, x: Tensor, target: int, source: int, count: int) -> Finish:
        sent, received = [0] * self.context.size, [0] * self.context.size
        sent[target * self.heads + self.first] = x.numel()
        received[source * self.heads + self.first] = count
        return start_exchange(x.view(-1), sent, received, self.context.group)


def _range(chosen: Sequence[bool]) -> tuple[int, int]:
    """From the first to after the last that is chosen; (0, 0) if none is."""
    places = [place for place, each in enumerate(chosen) if each]
    return (places[0], places[-1] + 1) if places else (0, 0)
