"""Attention to keys that arrive in blocks, from other ranks or from host memory.

A block of keys is processed in tiles of queries and keys. Most tiles are whole blocks, which need
no mask or only the causal triangle, and take one kernel call. Tiles at the edge of a window or
document, or with ALiBi, have an explicit mask. It covers only some query rows and the keys visible
to them. A mask of the whole sequence is never created.

Shapes: B batch, N query heads, K key heads, S queries, T keys of a block, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.features.context import kernels
from megatron.features.context.documents import DocumentBounds
from megatron.features.context.exchange import KeyBlock, KeySource, Span, Spans
from megatron.features.context.kernels import Scoring
from megatron.model.attention_masks import Place, Window, first_key, last_key, slopes_on
from megatron.parallel.random import derive_seed

_HIDDEN = -1e30
"""Value added to masked scores. It is finite, so that a fully masked row of a tile is not NaN in
any kernel. The weight of such a row is 0 when the tile is merged."""

_MASK = 1 << 23
"""Maximum number of elements of a mask, unless its minimum of 16 queries needs more."""

_ROWS = 512
"""Maximum number of queries of a tile with a mask, which contains all keys visible to them."""

_KEYS = 4096
"""Maximum number of keys of a tile whose mask differs by head."""

_FAR = 1 << 62


class Tile(NamedTuple):
    """Queries and keys of one kernel call: their indices in the tensors, and the positions of the
    first query and first key in the sequence."""

    queries: slice
    keys: slice
    query: int
    key: int
    kind: Literal["all", "causal", "masked"]


@dataclass(frozen=True)
class BlockRule:
    """Rule for the keys that are visible to a query, by positions in the sequence, and for their
    scores.

    Attributes:
        causal: whether later keys are hidden from queries.
        window: as in :class:`~megatron.model.attention_masks.AttentionScoring`.
        slopes: ALiBi slope of each head.
        documents: documents of the positions; a query attends only to its own document.
        tokens: bool [B, 1, 1, keys of the sequence], False for padding, which is always hidden.
        seed: seed from which the dropout seed of each tile is derived.
    """

    scoring: Scoring
    causal: bool = True
    window: Window = None
    slopes: tuple[float, ...] = ()
    documents: DocumentBounds | None = None
    tokens: Tensor | None = None
    seed: int = 0
    _tiles: dict[tuple[Spans, Spans], list[Tile]] = field(default_factory=dict, compare=False)

    def first(self, query: Place) -> Place | int:
        """Return the first position that is visible to a query, apart from documents and
        padding."""
        return -_FAR if self.window is None else first_key(query, self.window, self.causal)

    def last(self, query: Place) -> Place | int:
        """Return the last position that is visible to a query, apart from documents and padding."""
        if self.window is None:
            return query if self.causal else _FAR
        return last_key(query, self.window, self.causal)

    def seen(self, queries: Span) -> Span:
        """Return a range that contains every key that is visible to any query of a span."""
        first, end = self.first(queries[0]), self.last(queries[1] - 1) + 1
        if self.documents is None:
            return first, end
        of_documents = self.documents.seen(queries)
        return max(first, of_documents[0]), min(end, of_documents[1])

    def shared(self, queries: Span) -> Span:
        """Return the range of keys that are visible to all queries of a span."""
        first, end = self.first(queries[1] - 1), self.last(queries[0]) + 1
        if self.documents is None:
            return first, end
        of_documents = self.documents.shared(queries)
        return max(first, of_documents[0]), min(end, of_documents[1])

    def sees(self, queries: Spans, keys: Span) -> bool:
        """Return whether any of the keys may be visible to any of the queries."""
        ranges = map(self.seen, queries)
        return any(first < keys[1] and keys[0] < end for first, end in ranges)

    def tiles(self, queries: Spans, keys: Spans) -> list[Tile]:
        """Return the tiles of a block, which are cached by the spans."""
        if (queries, keys) not in self._tiles:
            self._tiles[queries, keys] = self._cut(queries, keys)
        return self._tiles[queries, keys]

    def _cut(self, queries: Spans, keys: Spans) -> list[Tile]:
        if queries == keys and self._triangular((queries[0][0], queries[-1][1])):
            whole = slice(0, sum(end - first for first, end in queries))
            return [Tile(whole, whole, queries[0][0], keys[0][0], "causal")]
        tiles, row = [], 0
        for rows in queries:
            column = 0
            for columns in keys:
                tiles += self._pair(rows, columns, row - rows[0], column - columns[0])
                column += columns[1] - columns[0]
            row += rows[1] - rows[0]
        return _joined(tiles)

    def _triangular(self, span: Span) -> bool:
        """Return whether each query of a span sees exactly the span's keys up to its own
        position."""
        alone = not (self.slopes or self.tokens is not None)
        return (
            alone
            and self.causal
            and self.shared((span[1] - 1, span[1]))[0] <= span[0]
            and (self.documents is None or self.documents.shared(span)[0] <= span[0])
        )

    def _pair(self, rows: Span, columns: Span, row: int, column: int) -> list[Tile]:
        """Return the tiles of the keys ``columns`` for the queries ``rows``. ``row`` and ``column``
        are offsets that convert positions to tensor indices."""
        seen, shared = self.seen(rows), self.shared(rows)
        first, end = max(columns[0], seen[0]), min(columns[1], seen[1])
        if first >= end:
            return []

        def tile(first: int, end: int, kind: Literal["all", "causal", "masked"]) -> Tile:
            queries = slice(rows[0] + row, rows[1] + row)
            return Tile(queries, slice(first + column, end + column), rows[0], first, kind)

        biased = self.slopes or self.tokens is not None
        if not biased:
            if shared[0] <= first and end <= shared[1]:
                return [tile(first, end, "all")]
            if (first, end) == rows and self._triangular(rows):
                return [tile(first, end, "causal")]
            if self.causal and first < rows[0] < end and shared[0] <= first:
                before = tile(first, rows[0], "all")
                return [before, *self._pair(rows, (rows[0], end), row, column)]
        length, height = end - first, rows[1] - rows[0]
        if self.slopes and length > _KEYS:
            cuts = [(at, min(at + _KEYS, end)) for at in range(first, end, _KEYS)]
            return [tile for cut in cuts for tile in self._pair(rows, cut, row, column)]
        most = min(_ROWS, max(16, _MASK // (length * max(1, len(self.slopes)))))
        by_row = self.slopes or not (shared[0] <= first and end <= shared[1])
        if by_row and height > most:
            cuts = [(at, min(at + most, rows[1])) for at in range(rows[0], rows[1], most)]
            return [tile for cut in cuts for tile in self._pair(cut, (first, end), row, column)]
        return [tile(first, end, "masked")]

    def mask(self, tile: Tile, q_BNSD: Tensor) -> Tensor | None:
        """Return the mask that is added to the scores of a tile, broadcastable to their shape, or
        None if it needs no mask other than the causal one."""
        if tile.kind != "masked":
            return None
        rows, columns = _span(tile.query, tile.queries), _span(tile.key, tile.keys)
        device, shared = q_BNSD.device, self.shared(rows)
        places_S1 = torch.arange(*rows, device=device)[:, None]
        keys_T = torch.arange(*columns, device=device)
        hidden = torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=device)
        if self.tokens is not None:
            hidden = ~self.tokens[..., slice(*columns)]
        if not (shared[0] <= columns[0] and columns[1] <= shared[1]):
            hidden = hidden | (keys_T < self.first(places_S1)) | (keys_T > self.last(places_S1))
            if self.documents is not None:
                hidden = hidden | self.documents.different(rows, columns)
        biases = torch.zeros((), device=device)
        if self.slopes:
            dtype = torch.promote_types(q_BNSD.dtype, torch.float32)
            distances_ST = (places_S1 - keys_T).abs()
            biases = -slopes_on(self.slopes, device, dtype)[:, None, None] * distances_ST
        shape = torch.broadcast_shapes(hidden.shape, biases.shape)
        mask = kernels.empty_mask((*shape[:-1], columns[1] - columns[0]), q_BNSD).copy_(biases)
        return mask.masked_fill_(hidden, max(_HIDDEN, torch.finfo(mask.dtype).min))

    def seed_of(self, tile: Tile) -> int:
        """Return the dropout seed of a tile."""
        return derive_seed(self.seed, tile.query, tile.key) if self.scoring.dropout else 0


def _span(first: int, indices: slice) -> Span:
    return first, first + indices.stop - indices.start


def _joined(tiles: list[Tile]) -> list[Tile]:
    """Join adjacent tiles without masks: first tiles with equal keys, then tiles with equal
    queries."""
    for along in (0, 1):
        joined: list[Tile] = []
        for tile in sorted(tiles, key=lambda tile: _corner(tile)[:: 2 * along - 1]):
            last = joined[-1] if joined else tile
            ends, starts = (last.queries, last.keys), (tile.queries, tile.keys)
            follows = ends[along].stop == starts[along].start
            alike = ends[1 - along] == starts[1 - along]
            if last.kind == tile.kind == "all" and follows and alike:
                both = slice(ends[along].start, starts[along].stop)
                last = last._replace(keys=both) if along else last._replace(queries=both)
                joined[-1] = last
            else:
                joined.append(tile)
        tiles = joined
    return tiles


def _corner(tile: Tile) -> tuple[int, int]:
    return tile.queries.start, tile.keys.start


def block_attention(
    q_BNSD: Tensor,
    k: Tensor,
    v: Tensor,
    source: KeySource,
    rule: BlockRule,
    spans: Spans,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Return the attention outputs [B, N, S, D] of queries at the positions ``spans`` to all
    blocks of keys that ``source`` makes from ``k`` and ``v``, according to ``rule``. Outputs and
    gradients are accumulated over blocks in float32 or wider. At least one key must be visible
    to each query."""
    return _BlockAttention.apply(q_BNSD, k, v, sinks_N, source, rule, spans)


class Accumulator:
    """Output for the keys so far, [B, N, S, D], and the log-sum-exp L of each query's scores, [B,
    N, S], in float32 or wider."""

    def __init__(self, q_BNSD: Tensor) -> None:
        kind = torch.promote_types(q_BNSD.dtype, torch.float32)
        batch, heads, length, width = q_BNSD.shape
        # Use the memory layout that the output projection reads.
        y_BSND = q_BNSD.new_zeros(batch, length, heads, width, dtype=kind)
        self.y_BNSD = y_BSND.transpose(1, 2)
        self.sums_BNS = q_BNSD.new_full((batch, heads, length), -torch.inf, dtype=kind)
        self._empty = True

    def add(self, q_BNSD: Tensor, block: KeyBlock, rule: BlockRule, spans: Spans) -> None:
        """Attend to another block."""
        for tile in rule.tiles(spans, block.spans):
            q = q_BNSD[:, :, tile.queries]
            y, sums = kernels.forward(
                q, block.k[:, :, tile.keys], block.v[:, :, tile.keys], rule.scoring,
                tile.kind == "causal", rule.mask(tile, q), rule.seed_of(tile),
            )  # fmt: skip
            before, total = self.y_BNSD[:, :, tile.queries], self.sums_BNS[:, :, tile.queries]
            if self._empty and sums.shape == self.sums_BNS.shape:
                before.copy_(y)
                total.copy_(sums)
                self._empty = False
                continue
            self._empty = False
            both = torch.logaddexp(total, sums)
            before.mul_(torch.exp(total - both)[..., None])
            before.addcmul_(y, torch.exp(sums - both)[..., None])
            total.copy_(both)

    def result(self, dtype: torch.dtype, sinks_N: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output in ``dtype``, and L. Attention sinks, which have no values, are
        included."""
        if sinks_N is None:
            return self.y_BNSD.to(dtype), self.sums_BNS
        total = torch.logaddexp(self.sums_BNS, sinks_N.to(self.sums_BNS.dtype)[:, None])
        self.y_BNSD.mul_(torch.exp(self.sums_BNS - total)[..., None])
        return self.y_BNSD.to(dtype), total


class Gradients:
    """Gradient of the queries from the blocks so far, in float32 or wider. ``y_BNSD`` and
    ``sums_BNS`` are the final output and L."""

    def __init__(self, grad_BNSD: Tensor, q_BNSD: Tensor, y_BNSD: Tensor, sums_BNS: Tensor) -> None:
        self.grad, self.q, self.y, self.sums = grad_BNSD, q_BNSD, y_BNSD, sums_BNS
        self.q_grad = torch.zeros_like(q_BNSD, dtype=sums_BNS.dtype)

    def add(self, block: KeyBlock, rule: BlockRule, spans: Spans) -> tuple[Tensor, Tensor]:
        """Add the gradients of another block, and return those of its keys and values."""
        kind = self.sums.dtype
        k_grad, v_grad = (torch.zeros_like(x, dtype=kind) for x in (block.k, block.v))
        for tile in rule.tiles(spans, block.spans):
            at, keys = tile.queries, tile.keys
            q = self.q[:, :, at]
            grads = kernels.backward(
                self.grad[:, :, at], q, block.k[:, :, keys], block.v[:, :, keys],
                self.y[:, :, at], self.sums[:, :, at], rule.scoring,
                tile.kind == "causal", rule.mask(tile, q), rule.seed_of(tile),
            )  # fmt: skip
            self.q_grad[:, :, at] += grads[0]
            k_grad[:, :, keys] += grads[1]
            v_grad[:, :, keys] += grads[2]
        return k_grad, v_grad

    def of_sinks(self, sinks_N: Tensor) -> Tensor:
        """Return the gradient of the attention sinks, [N]. A sink's weight reduces all other
        weights in proportion."""
        kind = self.sums.dtype
        weights = torch.exp(sinks_N.to(kind)[:, None] - self.sums)
        dots = torch.linalg.vecdot(self.grad.to(kind), self.y.to(kind))
        return -(weights * dots).sum((0, 2)).to(sinks_N.dtype)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        source: KeySource,
        rule: BlockRule,
        spans: Spans,
    ) -> Tensor:
        ctx.source, ctx.rule, ctx.spans = source, rule, spans
        sum_of_blocks = Accumulator(q)
        source.forward(k, v, lambda block: sum_of_blocks.add(q, block, rule, spans))
        y, sums = sum_of_blocks.result(q.dtype, sinks)
        ctx.save_for_backward(q, k, v, sinks, y, sums)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, y, sums = ctx.saved_tensors
        rule, spans = ctx.rule, ctx.spans
        gradients = Gradients(grad, q, y, sums)
        k_grad, v_grad = ctx.source.backward(k, v, lambda block: gradients.add(block, rule, spans))
        of_sinks = None if sinks is None else gradients.of_sinks(sinks)
        return gradients.q_grad.to(q.dtype), k_grad, v_grad, of_sinks, None, None, None
