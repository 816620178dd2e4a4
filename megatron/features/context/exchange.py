"""Exchange of heads and of keys between context-parallel ranks.

All exchanges are collectives of the context group, in which some ranks send or receive nothing.

Heads (Ulysses, Jacobs et al. 2023, arXiv:2309.14509): U neighbouring ranks, each with all N heads
of its own tokens, exchange them so that each gets N / U heads of all their tokens. Keys (ring
attention, Liu et al. 2023, arXiv:2310.01889): in each step, a rank receives the keys and values of
another rank, while it computes with those of the previous step. Only halves that are visible to a
query of the receiver are sent, directly from their own rank. With a causal mask this is three
quarters of what a full ring would transfer.

Shapes: P context-parallel ranks, U that exchange heads, R = P / U that exchange keys; B batch, N
query heads, K key heads, h heads of one rank or tensor, s tokens of a rank, w = s / 2 tokens of a
piece (half of a rank's tokens), S whole sequence of U ranks or of all, D head width.
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
"""Half-open range of positions: (first, end)."""

Spans = tuple[Span, ...]
"""Positions of the tokens of a tensor, as consecutive ranges."""


def spans_of(rank: int, size: int, length: int) -> Spans:
    """Return the positions of the tokens of one of ``size`` ranks, which has one piece from each
    half of the sequence."""
    width = length // (2 * size)
    last = length - rank * width
    return (rank * width, (rank + 1) * width), (last - width, last)


def start_exchange(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Finish:
    """Start an all-to-all that sends ``sent[n]`` rows of the contiguous ``x`` to each rank n, and
    receives ``received[n]`` rows from it. Return a function that waits for the result."""
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
    """Exchange of heads among ``size`` neighbouring context-parallel ranks."""

    context: Context
    size: int

    @property
    def rank(self) -> int:
        return self.context.rank % self.size

    def scatter_heads(
        self, q_BNsD: Tensor, k_BKtD: Tensor, v_BKtD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's query heads, [B, N / U, S, D], and the key and value heads that they
        use, for the tokens of all neighbours, in one collective. If U does not divide K, key heads
        are sent to every rank whose queries use them."""
        return _Heads.apply(self, q_BNsD, k_BKtD, v_BKtD)

    def gather_heads(self, y_BhSD: Tensor) -> Tensor:
        """Return all heads of this rank's tokens, [B, N, s, D]: the inverse of
        :meth:`scatter_heads` for outputs."""
        return _Tokens.apply(self, y_BhSD)

    def key_heads(self, heads: int, key_heads: int) -> list[int] | None:
        """Return the key heads to send, grouped by receiving rank, if several ranks need the same
        ones. Return None if the key heads can be divided among the ranks, so that each is sent
        once."""
        if key_heads % self.size == 0:
            return None
        group, each = heads // key_heads, heads // self.size
        # Largest number of query heads that share a key head on every receiving rank.
        sharing = math.gcd(group, each)
        return [head // group for head in range(0, heads, sharing)]

    def to_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Exchange tensors [B, U h, s, D] for tensors [B, h, S, D]."""
        parts_UBhsD = [x.unflatten(1, (self.size, -1)).transpose(0, 1) for x in tensors]
        return [self._joined(part) for part in self._exchanged(parts_UBhsD)]

    def to_tokens(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Exchange tensors [B, h, S, D] for tensors [B, U h, s, D], in which the heads of a token
        are adjacent in memory."""
        parts = self._exchanged([self._pieces(x) for x in tensors])
        return [part.permute(1, 3, 0, 2, 4).flatten(2, 3).transpose(1, 2) for part in parts]

    def _exchanged(self, parts_UX: Sequence[Tensor]) -> list[Tensor]:
        """Send slice n of each tensor to neighbour n, and return the slices from all neighbours."""
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
    """Sum the gradients of copies of ``count`` heads into the gradients of the heads."""
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
    """Keys and values at the positions ``spans``, [B, K, T, D]. Only D must be contiguous."""

    k: Tensor
    v: Tensor
    spans: Spans


class KeySource(Protocol):
    """Source of the blocks of keys and values that queries attend to.

    The tensors ``k`` and ``v`` receive gradients, whether they are a rank's tokens or chunks in
    host memory. :meth:`forward` and :meth:`backward` call ``visit`` with one block after another,
    in any order, at least with every block that a query attends to. While a block is visited, the
    next one should be in transfer. A block may be overwritten after ``visit`` has returned.
    """

    def forward(self, k: Tensor, v: Tensor, visit: Callable[[KeyBlock], None]) -> None: ...

    def backward(
        self, k: Tensor, v: Tensor, visit: Callable[[KeyBlock], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of ``k`` and ``v``, with their shapes and devices. They are sums of
        the gradients that ``visit`` returns for each block, [B, K, T, D], in float32 or wider."""
        ...


def gather(context: Context, k_BKsD: Tensor, v_BKsD: Tensor) -> tuple[Tensor, Tensor]:
    """All-gather the keys and values of the whole sequence, [B, K, S, D], in one collective."""
    packed = _packed(k_BKsD, v_BKsD)
    parts = start_gather(packed, context.group)()
    first, second = parts.unflatten(0, (context.size, 2, -1)).unbind(1)
    return _unpacked(torch.cat((first.flatten(0, 1), second.flip(0).flatten(0, 1))))


def scatter_gradients(context: Context, k_BKSD: Tensor, v_BKSD: Tensor) -> tuple[Tensor, Tensor]:
    """Reduce-scatter the gradients: sum them over the ranks, and return those of this rank's
    tokens, [B, K, s, D]. This is the transpose of :func:`gather`."""
    pieces = _packed(k_BKSD, v_BKSD).unflatten(0, (2 * context.size, -1))
    parts = torch.stack((pieces[: context.size], pieces[context.size :].flip(0)), 1)
    return _unpacked(start_scatter(parts.flatten(0, 2), context.group)())


def _packed(k_BKsD: Tensor, v_BKsD: Tensor) -> Tensor:
    """Pack keys and values as [s, 2, B, K, D], in which ranges of the sequence are contiguous."""
    return torch.stack((k_BKsD, v_BKsD)).permute(3, 0, 1, 2, 4).contiguous()


def _unpacked(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return views [B, K, s, D] of packed keys and values."""
    k, v = packed.permute(1, 2, 3, 0, 4)
    return k, v


class Gathered(NamedTuple):
    """Keys and values of all ranks, gathered in the forward pass and again in the backward pass."""

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
    """All-gather the keys and values of the whole sequence, and keep them for the backward pass."""
    return _WholeKeys.apply(context, k_BKsD, v_BKsD)


class Ring:
    """Keys and values of one rank after another, among ranks whose numbers differ by multiples of
    ``heads``. The ranks in between exchange heads.

    In step t a rank sends its own keys to the t-th rank after it. While a block is visited, the
    next step's block is transferred. In the backward pass, the previous block's gradients are
    returned to its rank at the same time, in float32 or wider.

    Args:
        sees: function that returns whether queries at some positions see any of a span of keys.
        queries: length of the query sequence; ``keys`` is the length of the key sequence.
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
        # Range of the pieces of each source that are visible to each target. Every rank computes
        # all of these ranges, and can therefore skip steps without any transfer.
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
        """Yield each step with its block, or with None if this rank sees no key of the block."""
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
        """Start returning gradients to the rank whose keys arrived in a step. Return a function
        that waits, and adds the gradients that this rank receives for its own keys to ``total``."""
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
    """Return the half-open range that spans all True entries, or (0, 0) if all are False."""
    places = [place for place, each in enumerate(chosen) if each]
    return (places[0], places[-1] + 1) if places else (0, 0)
