"""Paged attention of generated tokens: a softmax for each page, combined in sequence order.

A page that one token reads is a GEMM with the query heads that share a key head, padded with empty
rows up to the number from which a row's bits no longer depend on the number of rows. A page that
several tokens read (training with identical texts, or a shared prompt) is one GEMM for all of them,
with the same bits.

On a CPU each run of consecutive pages is one batched GEMM that reads the pages in place, since a
copy would take longer than the GEMM. Each thread computes whole matrices, because splitting one
changes the bits of some rows. A single matrix, or one that several tokens share, uses one thread.

Shapes: B generated tokens and drafts, C pages of the longest of their sequences, U pages that are
read, N query heads, K key and value heads, G = N / K query heads that share a key head, R rows of a
GEMM, X pages, P positions of a page, L keys of consecutive pages, D head width, V width of a value,
E = V + 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.apps.generation.execution.row_rule import SMALL_PRODUCT
from megatron.config.blocks import Window
from megatron.model.attention_masks import AttentionScoring, first_key

Ids = npt.NDArray[np.int64]

_VECTORS = 64  # number of columns that a summation kernel processes at a time
# Maximum gap in a run, in pages that are multiplied needlessly: a separate call would take longer.
_GAP = 3
_FEWEST = (1, 4, 8)  # candidates for the fewest rows of a GEMM
_TRIED = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 31, 64)
_MOST_TRIED = 137


class StoredPages(NamedTuple):
    """Stored keys [X, K, P, D] and values [X, K, P, V] of a block. If ``one`` is set, the values
    are the first V elements of the keys."""

    keys: Tensor
    values: Tensor
    one: bool = False

    def rows(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys [K, L, D] and values [K, L, V] of some pages, copied and concatenated."""
        keys_KLD = self.keys[pages].transpose(0, 1).flatten(1, 2)
        if self.one:
            return keys_KLD, keys_KLD[..., : self.values.shape[-1]]
        return keys_KLD, self.values[pages].transpose(0, 1).flatten(1, 2)


class ReadShape(NamedTuple):
    """Sizes of a block's GEMMs with pages.

    Attributes:
        fewest: number of rows from which a row's bits do not depend on the number of rows. None if
            they always depend on it, and on accelerators.
    """

    heads: int
    group: int
    key_width: int
    value_width: int
    positions: int
    dtype: torch.dtype
    fewest: int | None

    @classmethod
    def of(cls, q_BKGD: Tensor, stored: StoredPages) -> ReadShape:
        """Return the sizes for queries on stored pages. On a CPU this measures ``fewest``."""
        heads, group, width = q_BKGD.shape[-3:]
        positions, values = stored.values.shape[2:]
        fewest = None
        if q_BKGD.device.type == "cpu":
            sizes = width, values, positions, q_BKGD.dtype
            fewest = _fewest_rows(*sizes, torch.get_num_threads())
        return cls(heads, group, width, values, positions, q_BKGD.dtype, fewest)

    @property
    def rows(self) -> int:
        """Number of rows, with padding, of the GEMM of one token with one page."""
        return max(self.group, self.fewest or 1)

    @property
    def readers(self) -> float:
        """Minimum number of tokens that can share one GEMM with a page. Infinite if a row's bits
        always depend on the number of rows."""
        if self.fewest is None:
            return math.inf
        least = max(2, -(-self.fewest // self.group))
        if self.dtype.itemsize == 2:
            width = min(self.key_width, self.value_width)
            one = self.heads * self.group * width * self.positions
            least = max(least, SMALL_PRODUCT // one + 1)
        return least


class _Run(NamedTuple):
    """Run of pages, at indices ``begin`` to ``end`` - 1 of U. The pages are consecutive, starting
    with ``page``, or all equal to ``page``."""

    begin: int
    end: int
    page: int


@dataclass(frozen=True)
class _Pages:
    """Pages that are multiplied in the same way.

    Attributes:
        same: whether each run repeats a single page. K then precedes U in tensor shapes.
        runs: runs of pages, which a CPU reads in place.
        pages_U: page numbers. Accelerators copy these pages, since each call costs more there.
        owners_U: index among the B tokens of the reader of each page.
        mask_UP: mask added to the scores, 0 or -infinity.
        distances_UP: distance from the token back to each key, at least 0.
    """

    same: bool
    runs: Sequence[_Run]
    pages_U: Tensor
    owners_U: Tensor
    mask_UP: Tensor
    distances_UP: Tensor


@dataclass(frozen=True)
class PageReading:
    """Pages that the generated tokens of a step read within an attention window.

    Attributes:
        parts: the pages that one token reads, then those that several tokens read.
        places_BC: for each token, the indices in U of its pages, in order. Arbitrary if missing.
        missing_BC: -infinity for missing pages, else 0.
    """

    shape: ReadShape
    parts: Sequence[_Pages]
    places_BC: Tensor
    missing_BC: Tensor

    @classmethod
    def of(
        cls,
        positions_B: Sequence[int],
        tables: Sequence[Sequence[int]],
        window: Window,
        shape: ReadShape,
        device: torch.device,
        unseen: int = 0,
    ) -> PageReading:
        """Return the pages read by tokens at these positions of sequences with these page
        tables. A key among the first ``unseen`` positions is visible only to the query at its
        own position."""

        def moved(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        P = shape.positions
        firsts = [first_page(q, P, window) for q in positions_B]
        counts = [q // P + 1 - first for q, first in zip(positions_B, firsts, strict=True)]
        read = zip(tables, firsts, counts, strict=True)
        pages_U = np.concatenate([t[first : first + count] for t, first, count in read])
        pages_U = pages_U.astype(np.int64)
        owners_U = np.repeat(np.arange(len(counts)), counts)
        order_U = np.concatenate([np.arange(f, f + c) for f, c in zip(firsts, counts, strict=True)])
        order_C = np.arange(max(counts))
        missing_BC = order_C >= np.array(counts)[:, None]
        begins_B1 = (np.cumsum(counts) - counts)[:, None]
        places_BC = begins_B1 + np.where(missing_BC, 0, order_C)
        of_each_U = np.unique(pages_U, return_inverse=True, return_counts=True)
        several_U = of_each_U[2][of_each_U[1]] >= shape.readers
        places_U, parts, total = np.zeros(len(pages_U), np.int64), [], 0
        for same in (False, True):
            (some,) = np.nonzero(several_U == same)
            if not len(some):
                continue
            some = some[np.argsort(pages_U[some], kind="stable")]
            runs, into = _runs(pages_U[some], same, device.type == "cpu")
            count = runs[-1].end
            # A page that fills a gap in a run is given an arbitrary reader. Its result is not used.
            sources = np.full(count, some[0])
            sources[into] = some
            places_U[some] = total + into
            total += count
            queries_U1 = np.array(positions_B)[owners_U[sources]][:, None]
            keys_UP = order_U[sources][:, None] * P + np.arange(P)
            distances_UP = queries_U1 - keys_UP
            hidden_UP = distances_UP < 0
            hidden_UP |= (keys_UP < unseen) & (distances_UP > 0)
            if window is not None:
                hidden_UP |= keys_UP < first_key(queries_U1, window)
            parts.append(
                _Pages(
                    same,
                    runs,
                    moved(pages_U[sources]),
                    moved(owners_U[sources]),
                    moved(_minus_infinity(hidden_UP)),
                    moved(distances_UP.clip(min=0)),
                )
            )
        places_BC = places_U[places_BC]
        return cls(shape, parts, moved(places_BC), moved(_minus_infinity(missing_BC)))

    def attend(
        self,
        q_BKGD: Tensor,
        stored: StoredPages,
        scores: AttentionScoring,
        bias_NT: Tensor | None,
        sinks_N: Tensor | None,
    ) -> Tensor:
        """Return the attention output [B, K, G, V]. Sums over pages are in float32."""
        of_parts = (self._of_pages(q_BKGD, stored, scores, bias_NT, part) for part in self.parts)
        largest, both = zip(*of_parts, strict=True)
        largest_UKG1, both_UKGE = _together(largest), _together(both)
        # Combine the pages of each sequence. Missing pages have weight 0.
        largest_BCKG1 = self._taken(largest_UKG1) + self.missing_BC[..., None, None, None]
        most_B1KG1 = largest_BCKG1.amax(1, keepdim=True)
        if sinks_N is not None:
            sinks_KG1 = sinks_N.to(most_B1KG1.dtype).view(self.shape.heads, -1, 1)
            most_B1KG1 = torch.maximum(most_B1KG1, sinks_KG1)
        shares_BCKG1 = (largest_BCKG1 - most_B1KG1).exp_()
        sums_BKGE = _sum_of_pages(self._taken(both_UKGE).mul_(shares_BCKG1))
        if sinks_N is not None:
            sums_BKGE[..., -1:] += (sinks_KG1 - most_B1KG1[:, 0]).exp_()
        return (sums_BKGE[..., :-1] / sums_BKGE[..., -1:]).to(q_BKGD.dtype)

    def _of_pages(
        self,
        q_BKGD: Tensor,
        stored: StoredPages,
        scores: AttentionScoring,
        bias_NT: Tensor | None,
        pages: _Pages,
    ) -> tuple[Tensor, Tensor]:
        """Return the largest score [U, K, G, 1] in each page, and [U, K, G, E]: the weighted sums
        of the values, followed by the sum of the weights."""
        keys, values, _ = stored
        mask = pages.mask_UP[:, None, None]
        if pages.same:
            q = q_BKGD.transpose(0, 1).index_select(1, pages.owners_U)
            mask = mask.transpose(0, 1)
        else:
            q = q_BKGD.index_select(0, pages.owners_U)
        scored = scaled_scores(self._products(q, keys.transpose(2, 3), pages), q, scores)
        if bias_NT is not None:
            biases_KGUP = bias_NT[:, pages.distances_UP].unflatten(0, (self.shape.heads, -1))
            order = (0, 2, 1, 3) if pages.same else (2, 0, 1, 3)
            scored = scored + biases_KGUP.permute(order)
        scored = scored + mask
        largest = scored.amax(-1, keepdim=True)
        weights = scored.sub_(largest).exp_()
        totals = weights.sum(-1, keepdim=True)
        y = self._products(weights.to(values.dtype), values, pages)
        both = torch.cat([y.to(totals.dtype), totals], -1)
        return (largest.transpose(0, 1), both.transpose(0, 1)) if pages.same else (largest, both)

    def _products(self, left: Tensor, right_XKAB: Tensor, pages: _Pages) -> Tensor:
        """Multiply ``left`` by the pages [X, K, A, B], one GEMM for each key head. Return [U, K, G,
        B], or [K, U, G, B] if ``pages.same``."""
        K, group, rows = self.shape.heads, self.shape.group, self.shape.rows
        if pages.same:
            products = left.new_empty(*left.shape[:-1], right_XKAB.shape[-1])
            with one_thread():
                for begin, end, page in pages.runs:
                    into = products[:, begin:end].flatten(1, 2)
                    torch.bmm(left[:, begin:end].flatten(1, 2), right_XKAB[page], out=into)
            return products
        if rows > group:
            left = F.pad(left, (0, 0, 0, rows - group))
        left, count = left.flatten(0, 1), left.shape[0]
        if left.device.type != "cpu":
            products = torch.bmm(left, right_XKAB[pages.pages_U].flatten(0, 1))
        else:
            products = self._products_of_runs(left, right_XKAB.flatten(0, 1), pages)
        return products.unflatten(0, (count, K))[:, :, :group]

    def _products_of_runs(self, left: Tensor, right: Tensor, pages: _Pages) -> Tensor:
        """Multiply by runs of pages in place. Return [U * K, R, B]."""
        K, least = self.shape.heads, 1
        products = left.new_empty(*left.shape[:2], right.shape[-1])
        # Small 16-bit GEMMs use a different kernel: repeat them up to the size of larger ones.
        if left.dtype.itemsize == 2:
            least = SMALL_PRODUCT // (left[0].numel() * right.shape[-1]) + 1
        for begin, end, page in pages.runs:
            count = (end - begin) * K
            into, of_run = products[begin * K : end * K], left[begin * K : end * K]
            read = right[page * K : page * K + count]
            if count >= least:
                with one_thread() if count == 1 else nullcontext():
                    torch.bmm(of_run, read, out=into)
                continue
            again = -(-least // count)
            into[:] = torch.bmm(of_run.repeat(again, 1, 1), read.repeat(again, 1, 1))[:count]
        return products

    def _taken(self, x_U: Tensor) -> Tensor:
        """Gather the pages of each token. Return [B, C, ...] for an input [U, ...]."""
        places_BC = self.places_BC
        # index_select takes a third of the time that advanced indexing takes.
        return x_U.index_select(0, places_BC.flatten()).unflatten(0, places_BC.shape)


def _runs(pages_U: Ids, same: bool, joined: bool) -> tuple[list[_Run], Ids]:
    """Return the runs of pages, given in ascending order, and the index of each page in U. With
    ``same`` all pages of a run are equal. With ``joined`` a run includes the pages in its gaps."""
    steps = np.diff(pages_U)
    broken = steps != 0 if same else (steps < 1) | (steps > (_GAP if joined else 1))
    number_U = np.concatenate([[0], np.cumsum(broken)])
    begins = np.concatenate([[0], np.flatnonzero(broken) + 1])
    lasts = np.concatenate([begins[1:] - 1, [len(pages_U) - 1]])
    firsts = pages_U[begins]
    lengths = (lasts - begins if same else pages_U[lasts] - firsts) + 1
    ends = np.cumsum(lengths)
    inside_U = np.arange(len(pages_U)) - begins[number_U] if same else pages_U - firsts[number_U]
    columns = (ends - lengths).tolist(), ends.tolist(), firsts.tolist()
    return [_Run(*each) for each in zip(*columns, strict=True)], (ends - lengths)[
        number_U
    ] + inside_U


def _minus_infinity(where: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32]:
    return np.where(where, np.float32(-np.inf), np.float32(0))


def _together(parts: tuple[Tensor, ...]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _sum_of_pages(x_BCKGE: Tensor) -> Tensor:
    """Return the sum over C, in an order that does not depend on B or on zero pages at the end.
    Padding makes the columns a multiple of the vector width, because a kernel adds the remainder in
    a different order."""
    columns = x_BCKGE[0, 0].numel()
    whole = F.pad(x_BCKGE.flatten(2), (0, -columns % _VECTORS)).sum(1)
    return whole[:, :columns].unflatten(1, x_BCKGE.shape[2:])


def scaled_scores(products: Tensor, q: Tensor, scores: AttentionScoring) -> Tensor:
    """Scale and softcap attention scores in at least float32. Masks and biases are added later."""
    scale = 1 / math.sqrt(q.shape[-1]) if scores.scale is None else scores.scale
    scaled = products.to(torch.promote_types(products.dtype, torch.float32)) * scale
    cap = scores.softcap
    return scaled if cap is None else cap * torch.tanh(scaled / cap)


def first_page(query: int, positions: int, window: Window) -> int:
    """Return the index of the page with the first position that a query attends to."""
    return 0 if window is None else max(0, first_key(query, window)) // positions


@functools.lru_cache(maxsize=64)
def _fewest_rows(
    key_width: int, value_width: int, positions: int, dtype: torch.dtype, threads: int
) -> int | None:
    """Return the fewest rows of a GEMM with pages from which a row's bits do not depend on the
    number of rows, or None if they always do. Measured with random values."""
    random = torch.Generator().manual_seed(1)

    def tried(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    pages = tried(2, positions, key_width), tried(2, positions, value_width)
    products = [
        (tried(2, _MOST_TRIED, key_width), pages[0].transpose(1, 2)),
        (tried(2, _MOST_TRIED, positions), pages[1]),
    ]
    return next((rows for rows in _FEWEST if _independent(products, rows)), None)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch operators in this process to one thread within the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def _independent(products: Sequence[tuple[Tensor, Tensor]], fewest: int) -> bool:
    """Return whether a row has the same bits in every GEMM of at least ``fewest`` rows. Tests one
    or two matrices on one thread, and the pages of one token on all threads."""
    parts = [
        slice(first, first + rows)
        for rows in _TRIED
        for first in (0, 1, _MOST_TRIED - rows)
        if rows >= fewest
    ]
    for left, right in products:
        with one_thread():
            whole = torch.bmm(left, right)
            alone = all(
                torch.equal(torch.bmm(left[:count, at], right[:count]), whole[:count, at])
                for at in parts
                for count in (1, 2)
            )
        if not alone:
            return False
        if not all(torch.equal(torch.bmm(left[:, at], right), whole[:, at]) for at in parts):
            return False
    return True
