"""Attention of the parts of a step to the pages of their sequences.

A token's result depends on its own sequence only, to the last bit, where GEMMs of one shape do not
depend on other work:

- Queries of a prompt go in tiles of a page's positions, aligned with the pages and filled up with
  zeros, to all keys up to the end of the tile: the same GEMMs however a prompt is cut into parts.
- A generated token is one query, as each draft after it, with a GEMM of its own for each page of
  keys, a softmax for each page, and the pages added up in the order of the sequence. On a CPU a
  batched GEMM for each run of consecutive pages reads them where they are: a copy would take longer
  than the products.

Shapes: T tokens, S tokens of a part, B generated tokens and drafts, C pages of the longest of their
sequences, U pages that are read, N query heads, K key and value heads, G = N / K query heads that
share one, P positions of a page, L keys of a tile, D head width, V width of a value, W of a latent
vector.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.apps.generation.execution.row_rule import SMALL_PRODUCT
from megatron.apps.generation.execution.states import StateCache
from megatron.apps.generation.memory import PageMemory
from megatron.apps.generation.request import SequencePart
from megatron.config.blocks import Chunk, Window
from megatron.model.attention_masks import AttentionScoring, first_key, slopes_on
from megatron.model.caches import NeighborStore

_VECTORS = 64  # columns that kernels of sums take at a time


class EncodedPrompt:
    """The encoder's output for one prompt, [1, L, H], and keys and values of the blocks that have
    read it, [K, L, D]."""

    def __init__(self, output_1LH: Tensor) -> None:
        self.output_1LH = output_1LH
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def of(
        self, layer: int, keys_and_values: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        if layer not in self._layers:
            k, v = keys_and_values(self.output_1LH)
            k_KLD, v_KLD = (x[0].transpose(0, 1).contiguous() for x in (k, v))
            self._layers[layer] = k_KLD, v_KLD
        return self._layers[layer]


class _Stored(NamedTuple):
    """Keys [X, K, P, D] and values [X, K, P, V] of a block; with ``one`` the values are the first V
    numbers of the keys."""

    keys: Tensor
    values: Tensor
    one: bool = False

    def rows(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Copies [K, L, D] and [K, L, V] of pages in a row."""
        keys_KLD = self.keys[pages].transpose(0, 1).flatten(1, 2)
        if self.one:
            return keys_KLD, keys_KLD[..., : self.values.shape[-1]]
        return keys_KLD, self.values[pages].transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True)
class _Prompt:
    """A part of a prompt: its rows, its first position, and its pages on the device."""

    rows: slice
    start: int
    pages: Tensor


class _Query(NamedTuple):
    """A generated or drafted token: its row, its position, and the part that it is in."""

    row: int
    position: int
    part: SequencePart


class _Run(NamedTuple):
    """Consecutive pages ``first`` to ``end`` - 1 that are read at ``begin`` of U."""

    begin: int
    first: int
    end: int


@dataclass(frozen=True)
class _Reading:
    """The pages that the generated tokens of a step read within a window: those of the first token
    in order, then those of the next.

    Attributes:
        runs: the pages as runs, which a CPU reads in place.
        pages_U: their numbers; an accelerator, where many calls cost more, copies them.
        owners_U: the reader of each among the B tokens.
        mask_UP: addend of scores.
        distances_UP: from the token back to each key.
        places_BC: places in U of the pages of each token, in order; any for missing ones.
        missing_BC: -infinity for missing pages, else 0.
    """

    runs: Sequence[_Run]
    pages_U: Tensor
    owners_U: Tensor
    mask_UP: Tensor
    distances_UP: Tensor
    places_BC: Tensor
    missing_BC: Tensor


class PagedCache:
    """The cache of one step (`megatron.model.caches.LayerCache`): B is 1, and S all tokens of
    all parts, then padding, ``rows`` together. ``positions`` are the most of a sequence, of which
    the first ``unseen`` are attended to by themselves only."""

    def __init__(
        self,
        memory: PageMemory,
        parts: Sequence[SequencePart],
        rows: int,
        positions: int,
        encoded: Mapping[int, EncodedPrompt],
        neighbors: NeighborStore | None = None,
        padded: Callable[[int], int] = int,
        states: StateCache | None = None,
        unseen: int = 0,
    ) -> None:
        self.neighbors, self.padded, self._unseen = neighbors, padded, unseen
        self._memory, self.positions, self._encoded = memory, positions, encoded
        self._device = memory.device
        self._parts, self._states = parts, states
        P = memory.shape.positions
        at = [np.arange(part.start, part.start + len(part.tokens)) for part in parts]
        lengths = np.ones(rows, np.int64)
        places_T = np.zeros(rows, np.int64)
        places_T[: sum(map(len, at))] = np.concatenate(at)
        self._prompts: list[_Prompt] = []
        self._decoding: list[_Query] = []
        pages_T, row = [], 0
        for part, positions_S in zip(parts, at, strict=True):
            pages = np.array(part.pages)
            pages_T.append(pages[positions_S // P])
            end = row + len(part.tokens)
            last = positions_S if part.decoding else part.start + len(part.tokens) - 1
            lengths[row:end] = positions if part.long else last + 1
            if part.decoding:
                places = enumerate(positions_S.tolist(), row)
                self._decoding += [_Query(place, position, part) for place, position in places]
            else:
                self._prompts.append(_Prompt(slice(row, end), part.start, self._on_device(pages)))
            row = end
        self.tokens = row
        self.lengths_BS = self._on_device(lengths).unsqueeze(0)
        self.position_ids_BS = self._on_device(places_T).unsqueeze(0)
        self._pages_T, self._offsets_T = np.concatenate(pages_T), places_T[:row] % P
        self._written: dict[int, Tensor] = {}
        self._rows_B = self._on_device(np.array([each.row for each in self._decoding], np.int64))
        self._readings: dict[Window, _Reading] = {}

    def attend(
        self,
        layer: int,
        q_BSND: Tensor,
        k_BSKD: Tensor,
        v_BSKD: Tensor,
        scores: AttentionScoring,
        bias_NT: Tensor | None,
        sinks_N: Tensor | None,
    ) -> Tensor:
        """See :class:`LayerCache`; keys and values of the current tokens are written first."""
        stored = _Stored(*self._memory.of(layer))
        self._write(stored.keys, k_BSKD)
        self._write(stored.values, v_BSKD)
        return self._attend(q_BSND, stored, scores, bias_NT, sinks_N)

    def attend_latents(
        self,
        layer: int,
        q_BSNW: Tensor,
        latents_BSW: Tensor,
        width: int,
        scores: AttentionScoring,
        sinks_N: Tensor | None,
    ) -> Tensor:
        """See :class:`LayerCache`; latents of the current tokens are written first."""
        (latents_X1PW,) = self._memory.of(layer)
        self._write(latents_X1PW, latents_BSW)
        stored = _Stored(latents_X1PW, latents_X1PW[..., :width], one=True)
        return self._attend(q_BSNW, stored, scores, None, sinks_N)

    def recur(
        self,
        layer: int,
        inputs_BSX: Tensor,
        step: Callable[[Tensor, tuple[Tensor, ...] | None], tuple[Tensor, tuple[Tensor, ...]]],
    ) -> Tensor:
        """See :class:`LayerCache`."""
        assert self._states is not None
        return self._states.recur(layer, inputs_BSX, step)

    def _write(self, pool_XKPD: Tensor, new_BS: Tensor) -> None:
        """Write what a block keeps of the current tokens, [1, S, K, D] or [1, S, D]."""
        K, P, width = pool_XKPD.shape[1:]
        if K not in self._written:
            firsts_T = self._pages_T * (K * P) + self._offsets_T
            places = (firsts_T[:, None] + np.arange(K) * P).reshape(-1)
            self._written[K] = self._on_device(places)
        flat = new_BS[0, : self.tokens].reshape(-1, width)
        pool_XKPD.view(-1, width).index_copy_(0, self._written[K], flat)

    def _attend(
        self,
        q_BSND: Tensor,
        stored: _Stored,
        scores: AttentionScoring,
        bias_NT: Tensor | None,
        sinks_N: Tensor | None,
    ) -> Tensor:
        """[1, S, N, V]"""
        q_TKGD = q_BSND[0].unflatten(1, (stored.keys.shape[1], -1))
        if scores.slopes:
            distances = torch.arange(self.positions, device=self._device)
            bias_NT = -slopes_on(scores.slopes, self._device)[:, None] * distances
        y_TKGV = q_TKGD.new_zeros(*q_TKGD.shape[:-1], stored.values.shape[-1])
        if self._decoding:
            if scores.window not in self._readings:
                self._readings[scores.window] = self._planned(scores.window)
            q_BKGD, reading = q_TKGD.index_select(0, self._rows_B), self._readings[scores.window]
            y_BKGV = _read(q_BKGD, stored, scores, bias_NT, sinks_N, reading)
            y_TKGV.index_copy_(0, self._rows_B, y_BKGV)
        for prompt in self._prompts:
            y_SKGV = _prompt(q_TKGD, prompt, stored, scores, bias_NT, sinks_N, self._unseen)
            y_TKGV[prompt.rows] = y_SKGV
        return y_TKGV.flatten(1, 2).unsqueeze(0)

    def attend_encoded(
        self,
        layer: int,
        q_BSND: Tensor,
        keys_and_values: Callable[[Tensor], tuple[Tensor, Tensor]],
        scores: AttentionScoring,
        sinks_N: Tensor | None,
    ) -> Tensor:
        y_BSND, row = torch.zeros_like(q_BSND), 0
        for part in self._parts:
            assert part.encoded is not None
            end = row + len(part.tokens)
            keys_KLD, values_KLD = self._encoded[part.encoded].of(layer, keys_and_values)
            # A query is a GEMM of its own, as where it comes alone.
            for at in range(row, end):
                q_KGD = q_BSND[0, at].unflatten(0, (keys_KLD.shape[0], -1))
                weights_KGL = scaled_scores(
                    torch.bmm(q_KGD, keys_KLD.transpose(1, 2)), q_KGD, scores
                )
                weights_KGL = softmax(weights_KGL, sinks_N).to(values_KLD.dtype)
                y_BSND[0, at] = torch.bmm(weights_KGL, values_KLD).flatten(0, 1)
            row = end
        return y_BSND

    def _planned(self, window: Window) -> _Reading:
        P = self._memory.shape.positions
        queries = [each.position for each in self._decoding]
        firsts = [_first_page(q, P, window) for q in queries]
        counts = [q // P + 1 - first for q, first in zip(queries, firsts, strict=True)]
        read = zip(self._decoding, firsts, counts, strict=True)
        pages = [each.part.pages[first : first + count] for each, first, count in read]
        pages_U = np.concatenate(pages).astype(np.int64)
        owners_U = np.repeat(np.arange(len(queries)), counts)
        order_U = np.concatenate([np.arange(f, f + c) for f, c in zip(firsts, counts, strict=True)])
        keys_UP = order_U[:, None] * P + np.arange(P)
        queries_U1 = np.array(queries)[owners_U][:, None]
        distances_UP = queries_U1 - keys_UP
        hidden_UP = distances_UP < 0
        hidden_UP |= (keys_UP < self._unseen) & (distances_UP > 0)
        if window is not None:
            hidden_UP |= keys_UP < first_key(queries_U1, window)
        # A sum over rows adds up every fourth one first, in columns behind the last block of a
        # vector instruction: with a multiple of 4, missing pages do not change the order.
        order_C = np.arange(-(-max(counts) // 4) * 4)
        missing_BC = order_C >= np.array(counts)[:, None]
        begins_B1 = (np.cumsum(counts) - counts)[:, None]
        places_BC = begins_B1 + np.where(missing_BC, 0, order_C)
        return _Reading(
            _runs(pages_U),
            self._on_device(pages_U),
            self._on_device(owners_U),
            self._minus_infinity(hidden_UP),
            self._on_device(distances_UP.clip(min=0)),
            self._on_device(places_BC),
            self._minus_infinity(missing_BC),
        )

    def _minus_infinity(self, where: np.ndarray) -> Tensor:
        return self._on_device(np.where(where, np.float32(-np.inf), np.float32(0)))

    def _on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def _runs(pages_U: np.ndarray) -> list[_Run]:
    breaks = np.flatnonzero(np.diff(pages_U) != 1) + 1
    begins, ends = [0, *breaks.tolist()], [*breaks.tolist(), len(pages_U)]
    firsts = pages_U[begins].tolist()
    return [_Run(b, f, f + e - b) for b, f, e in zip(begins, firsts, ends, strict=True)]


def _read(
    q_BKGD: Tensor,
    stored: _Stored,
    scores: AttentionScoring,
    bias_NT: Tensor | None,
    sinks_N: Tensor | None,
    reading: _Reading,
) -> Tensor:
    """[B, K, G, V], float32 sums over the pages."""
    keys, values, _ = stored
    K = keys.shape[1]
    q_UKGD = q_BKGD.index_select(0, reading.owners_U)
    scores_UKGP = _products(q_UKGD, keys.transpose(2, 3), reading)
    scores_UKGP = scaled_scores(scores_UKGP, q_BKGD, scores)
    if bias_NT is not None:
        biases_NUP = bias_NT[:, reading.distances_UP]
        scores_UKGP = scores_UKGP + biases_NUP.transpose(0, 1).unflatten(1, (K, -1))
    scores_UKGP = scores_UKGP + reading.mask_UP[:, None, None]
    largest_UKG1 = scores_UKGP.amax(-1, keepdim=True)
    weights_UKGP = (scores_UKGP - largest_UKG1).exp_()
    totals_UKG1 = weights_UKGP.sum(-1, keepdim=True)
    weights_UKGP = weights_UKGP.to(values.dtype)
    y_UKGD = _products(weights_UKGP, values, reading)
    # Over the pages of a sequence: missing ones have no weight.
    largest_BCKG1 = _taken(largest_UKG1, reading) + reading.missing_BC[..., None, None, None]
    most_B1KG1 = largest_BCKG1.amax(1, keepdim=True)
    if sinks_N is not None:
        sinks_KG1 = sinks_N.to(most_B1KG1.dtype).view(K, -1, 1)
        most_B1KG1 = torch.maximum(most_B1KG1, sinks_KG1)
    shares_BCKG1 = (largest_BCKG1 - most_B1KG1).exp_()
    both_UKGE = torch.cat([y_UKGD.to(totals_UKG1.dtype), totals_UKG1], -1)
    sums_BKGE = _sum_of_pages(_taken(both_UKGE, reading).mul_(shares_BCKG1))
    if sinks_N is not None:
        sums_BKGE[..., -1:] += (sinks_KG1 - most_B1KG1[:, 0]).exp_()
    return (sums_BKGE[..., :-1] / sums_BKGE[..., -1:]).to(q_BKGD.dtype)


def _sum_of_pages(x_BCKGE: Tensor) -> Tensor:
    """The sum over C, whose order depends neither on B nor on zero pages at the end: other code
    adds columns that do not fill vectors."""
    columns = x_BCKGE[0, 0].numel()
    whole = F.pad(x_BCKGE.flatten(2), (0, -columns % _VECTORS)).sum(1)
    return whole[:, :columns].unflatten(1, x_BCKGE.shape[2:])


def _taken(x_U: Tensor, reading: _Reading) -> Tensor:
    """[U, ...] to the pages of each sequence, [B, C, ...]."""
    places_BC = reading.places_BC
    # A third of the time of indexing.
    return x_U.index_select(0, places_BC.flatten()).unflatten(0, places_BC.shape)


def _products(left_UKGA: Tensor, right_XKAB: Tensor, reading: _Reading) -> Tensor:
    """[U, K, G, B]: a GEMM for each page that is read and head."""
    pages, K, G = left_UKGA.shape[:3]
    left, right = left_UKGA.flatten(0, 1), right_XKAB.flatten(0, 1)
    products = left.new_empty(pages * K, G, right.shape[-1])
    if left.device.type == "cpu":
        counts = [(end - first) * K for _, first, end in reading.runs]
        least = 1
        if left.dtype.itemsize == 2:  # the code of many
            least = SMALL_PRODUCT // (left[0].numel() * right.shape[-1]) + 1
        runs = zip(reading.runs, counts, left.split(counts), products.split(counts), strict=True)
        for (_, first, end), count, of_run, into in runs:
            read = right[first * K : end * K]
            if count >= least:
                torch.bmm(of_run, read, out=into)
                continue
            again = -(-least // count)
            into[:] = torch.bmm(of_run.repeat(again, 1, 1), read.repeat(again, 1, 1))[:count]
    else:
        torch.bmm(left, right_XKAB[reading.pages_U].flatten(0, 1), out=products)
    return products.unflatten(0, (pages, K))


def scaled_scores(products: Tensor, q: Tensor, scores: AttentionScoring) -> Tensor:
    """Scores in float32 or better, before what is added to them."""
    scale = 1 / math.sqrt(q.shape[-1]) if scores.scale is None else scores.scale
    scaled = products.to(torch.promote_types(products.dtype, torch.float32)) * scale
    cap = scores.softcap
    return scaled if cap is None else cap * torch.tanh(scaled / cap)


def softmax(scores_KXL: Tensor, sinks_N: Tensor | None) -> Tensor:
    """The weights of the keys [K, X, L] for the G queries that share a head, or for X = G x Q of
    them, head by head; with sinks they add up to less than 1."""
    if sinks_N is None:
        return scores_KXL.softmax(-1)
    heads, rows = scores_KXL.shape[:2]
    each = rows * heads // len(sinks_N)
    sinks_KX1 = sinks_N.to(scores_KXL.dtype).repeat_interleave(each).view(heads, rows, 1)
    return torch.cat([scores_KXL, sinks_KX1], -1).softmax(-1)[..., :-1]


def _prompt(
    q_TKGD: Tensor,
    prompt: _Prompt,
    stored: _Stored,
    scores: AttentionScoring,
    bias_NT: Tensor | None,
    sinks_N: Tensor | None,
    unseen: int = 0,
) -> Tensor:
    """[S, K, G, V] of a part."""
    P, window, device = stored.keys.shape[2], scores.window, q_TKGD.device
    q_SKGD = q_TKGD[prompt.rows]
    count, heads, group, width = q_SKGD.shape
    begin = prompt.start // P
    tiles = (prompt.start + count - 1) // P - begin + 1
    before = prompt.start - begin * P
    padded = q_SKGD.new_zeros(tiles * P, heads, group, width)
    padded[before : before + count] = q_SKGD
    tiles_XKQD = padded.view(tiles, P, heads, group, width).permute(0, 2, 3, 1, 4)
    tiles_XKQD = tiles_XKQD.reshape(tiles, heads, group * P, width)
    first = _first_page(begin * P, P, window)
    # All keys of the tiles in a row, copied once.
    keys_KLD, values_KLV = stored.rows(prompt.pages[first : begin + tiles])
    y_XKQV = tiles_XKQD.new_empty(*tiles_XKQD.shape[:-1], values_KLV.shape[-1])
    for number in range(tiles):
        tile = begin + number
        start = _first_page(tile * P, P, window)
        seen = slice((start - first) * P, (tile + 1 - first) * P)
        scores_KQL = torch.bmm(tiles_XKQD[number], keys_KLD[:, seen].transpose(1, 2))
        scores_KQL = scaled_scores(scores_KQL, q_SKGD, scores)
        scores_KGPL = scores_KQL.unflatten(1, (group, P))
        earlier = (tile - start) * P
        if bias_NT is not None:
            distances_PL = _distances(earlier, P, device).clamp_(min=0)
            scores_KGPL += bias_NT[:, distances_PL].unflatten(0, (heads, group))
        # Within the window all earlier keys are seen: a mask of them would fill much memory.
        all_seen = window is None or first_key((tile + 1) * P - 1, window) <= start * P
        seen_whole = earlier if all_seen else 0
        inside = tile * P % window.size if isinstance(window, Chunk) else 0
        scores_KGPL[..., seen_whole:] += _mask(earlier - seen_whole, P, window, inside, device)
        if unseen and not start:
            hidden_Pu = _distances(earlier, P, device)[:, :unseen] > 0
            scores_KGPL[..., :unseen].masked_fill_(hidden_Pu, -torch.inf)
        weights_KQL = softmax(scores_KQL, sinks_N).to(values_KLV.dtype)
        torch.bmm(weights_KQL, values_KLV[:, seen], out=y_XKQV[number])
    y_XPKGV = y_XKQV.unflatten(2, (group, P)).permute(0, 3, 1, 2, 4)
    return y_XPKGV.flatten(0, 1)[before : before + count]


def _first_page(query: int, positions: int, window: Window) -> int:
    """The page of the first position that a query sees."""
    return 0 if window is None else max(0, first_key(query, window)) // positions


@functools.lru_cache(maxsize=32)
def _mask(before: int, positions: int, window: Window, inside: int, device: torch.device) -> Tensor:
    """The addend of the scores [P, L] of a tile and of so many keys before it; ``inside`` is the
    place of its first query in its chunk."""
    distances = _distances(before, positions, device)
    hidden = distances < 0
    if window is not None:
        queries_P1 = torch.arange(positions, device=device)[:, None] + inside
        hidden |= queries_P1 - distances < first_key(queries_P1, window)
    return torch.zeros(distances.shape, device=device).masked_fill_(hidden, -torch.inf)


def _distances(before: int, positions: int, device: torch.device) -> Tensor:
    """[P, L], from the queries of a tile back to its keys and so many before it."""
    queries = torch.arange(positions, device=device)[:, None] + before
    return queries - torch.arange(before + positions, device=device)
