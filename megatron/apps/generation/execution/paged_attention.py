"""Paged attention for the parts of a step.

If GEMMs of a fixed shape are reproducible, a token's result depends only on its own sequence, to
the last bit:

- Queries of a prompt are processed in tiles of one page's positions, aligned with the pages and
  padded with zeros. Each tile attends to all keys up to its end. So the GEMMs are the same however
  a prompt is split into parts.
- A generated token is one query, and so is each draft after it. It has a separate GEMM and softmax
  for each page of keys, and the pages are combined in sequence order. On a CPU each run of
  consecutive pages is one batched GEMM that reads the pages in place, since a copy would take
  longer than the GEMM.

Shapes: T tokens, S tokens of a part, B generated tokens and drafts, C pages of the longest of their
sequences, U pages that are read, N query heads, K key and value heads, G = N / K query heads that
share a key head, P positions of a page, L keys of a tile, D head width, V width of a value, W width
of a latent vector.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.apps.generation.execution.page_reading import (
    PageReading,
    ReadShape,
    StoredPages,
    first_page,
    scaled_scores,
)
from megatron.apps.generation.execution.states import StateCache
from megatron.apps.generation.memory import PageMemory
from megatron.apps.generation.request import SequencePart
from megatron.config.blocks import Chunk, Window
from megatron.features.retro.neighbors import NeighborStore
from megatron.model.attention_masks import AttentionScoring, first_key, slopes_on


class EncodedPrompt:
    """Encoder output [1, L, H] of one prompt, and its keys and values [K, L, D] by block."""

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


@dataclass(frozen=True)
class _Prompt:
    """Part of a prompt: its rows in the pass, its first position, and its pages on the device."""

    rows: slice
    start: int
    pages: Tensor


class _Query(NamedTuple):
    """Generated or drafted token: its row in the pass, its position, and its part."""

    row: int
    position: int
    part: SequencePart


class PagedCache:
    """The cache of one step (`megatron.model.layer_list.LayerCache`): B is 1, and S all tokens of
    all parts, then padding, ``rows`` together. ``positions`` is the maximum per sequence; the first
    ``unseen`` are attended to only by themselves."""

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
        lengths = np.ones(rows, np.int64)
        places: list[int] = []
        pages_T: list[int] = []
        self._prompts: list[_Prompt] = []
        self._decoding: list[_Query] = []
        for part in parts:
            row, end = len(places), len(places) + len(part.tokens)
            positions_S = range(part.start, part.start + len(part.tokens))
            places += positions_S
            pages_T += [part.pages[position // P] for position in positions_S]
            if part.decoding:
                self._decoding += [_Query(*each, part) for each in enumerate(positions_S, row)]
                lengths[row:end] = positions if part.long else np.array(positions_S) + 1
            else:
                pages = self._on_device(np.array(part.pages))
                self._prompts.append(_Prompt(slice(row, end), part.start, pages))
                lengths[row:end] = positions if part.long else positions_S.stop
        row = len(places)
        places_T = np.zeros(rows, np.int64)
        places_T[:row] = places
        self.tokens = row
        self.lengths_BS = self._on_device(lengths).unsqueeze(0)
        self.position_ids_BS = self._on_device(places_T).unsqueeze(0)
        self._pages_T, self._offsets_T = np.array(pages_T), places_T[:row] % P
        self._written: dict[int, Tensor] = {}
        rows_B = np.array([each.row for each in self._decoding], np.int64)
        # None if there is no prompt: the first rows are then the generated tokens.
        self._rows_B = self._on_device(rows_B) if self._prompts else None
        self._readings: dict[tuple[Window, ReadShape], PageReading] = {}

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
        """See :class:`LayerCache`."""
        return self.attended(layer, scores, None, q_BSND, k_BSKD, v_BSKD, bias_NT, sinks_N)

    def attend_latents(
        self,
        layer: int,
        q_BSNW: Tensor,
        latents_BSW: Tensor,
        width: int,
        scores: AttentionScoring,
        sinks_N: Tensor | None,
    ) -> Tensor:
        """See :class:`LayerCache`."""
        return self.attended(layer, scores, width, q_BSNW, latents_BSW, None, None, sinks_N)

    def attended(
        self,
        layer: int,
        scores: AttentionScoring,
        width: int | None,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        bias_NT: Tensor | None,
        sinks_N: Tensor | None,
    ) -> Tensor:
        """Write the current keys and values, then attend. If ``width`` is set, ``k`` contains
        latents [1, S, W], whose first ``width`` elements are the values. Return [1, S, N, V]."""
        pools = tuple(self._memory.of(layer))
        for pool_XKPD, new in zip(pools, (k, v), strict=False):
            assert new is not None
            self._write(pool_XKPD, new)
        values = pools[-1] if width is None else pools[0][..., :width]
        stored = StoredPages(pools[0], values, one=width is not None)
        return self._attend(q, stored, scores, bias_NT, sinks_N)

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
        """Write the current tokens' entries, [1, S, K, D] or [1, S, D], to a block's pool."""
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
        stored: StoredPages,
        scores: AttentionScoring,
        bias_NT: Tensor | None,
        sinks_N: Tensor | None,
    ) -> Tensor:
        """Return the attention output [1, S, N, V] for stored keys and values."""
        q_TKGD = q_BSND[0].unflatten(1, (stored.keys.shape[1], -1))
        if scores.slopes:
            distances = torch.arange(self.positions, device=self._device)
            bias_NT = -slopes_on(scores.slopes, self._device)[:, None] * distances
        rows_B, y_BKGV = self._rows_B, None
        if self._decoding:
            q_BKGD = q_TKGD[: self.tokens] if rows_B is None else q_TKGD.index_select(0, rows_B)
            reading = self._reading(scores.window, ReadShape.of(q_BKGD, stored))
            y_BKGV = reading.attend(q_BKGD, stored, scores, bias_NT, sinks_N)
            if len(q_BKGD) == len(q_TKGD):
                return y_BKGV.flatten(1, 2).unsqueeze(0)
        y_TKGV = q_TKGD.new_zeros(*q_TKGD.shape[:-1], stored.values.shape[-1])
        if y_BKGV is not None and rows_B is None:
            y_TKGV[: self.tokens] = y_BKGV
        elif y_BKGV is not None:
            y_TKGV.index_copy_(0, rows_B, y_BKGV)
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
            # Each query is a separate GEMM, so that its result is independent of others.
            for at in range(row, end):
                q_KGD = q_BSND[0, at].unflatten(0, (keys_KLD.shape[0], -1))
                weights_KGL = scaled_scores(
                    torch.bmm(q_KGD, keys_KLD.transpose(1, 2)), q_KGD, scores
                )
                weights_KGL = softmax(weights_KGL, sinks_N).to(values_KLD.dtype)
                y_BSND[0, at] = torch.bmm(weights_KGL, values_KLD).flatten(0, 1)
            row = end
        return y_BSND

    def _reading(self, window: Window, shape: ReadShape) -> PageReading:
        key = window, shape
        if key not in self._readings:
            positions = [each.position for each in self._decoding]
            tables = [each.part.pages for each in self._decoding]
            self._readings[key] = PageReading.of(
                positions, tables, window, shape, self._device, self._unseen
            )
        return self._readings[key]

    def _on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def softmax(scores_KXL: Tensor, sinks_N: Tensor | None) -> Tensor:
    """Return the softmax over the keys of scores [K, X, L]. X is the G query heads that share a key
    head, or G x Q for Q queries, grouped by head. With sinks the weights sum to less than 1."""
    if sinks_N is None:
        return scores_KXL.softmax(-1)
    heads, rows = scores_KXL.shape[:2]
    each = rows * heads // len(sinks_N)
    sinks_KX1 = sinks_N.to(scores_KXL.dtype).repeat_interleave(each).view(heads, rows, 1)
    return torch.cat([scores_KXL, sinks_KX1], -1).softmax(-1)[..., :-1]


def _prompt(
    q_TKGD: Tensor,
    prompt: _Prompt,
    stored: StoredPages,
    scores: AttentionScoring,
    bias_NT: Tensor | None,
    sinks_N: Tensor | None,
    unseen: int = 0,
) -> Tensor:
    """Return the attention output [S, K, G, V] for a part of a prompt."""
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
    first = first_page(begin * P, P, window)
    # Gather the keys and values of all tiles once.
    keys_KLD, values_KLV = stored.rows(prompt.pages[first : begin + tiles])
    y_XKQV = tiles_XKQD.new_empty(*tiles_XKQD.shape[:-1], values_KLV.shape[-1])
    for number in range(tiles):
        tile = begin + number
        start = first_page(tile * P, P, window)
        seen = slice((start - first) * P, (tile + 1 - first) * P)
        scores_KQL = torch.bmm(tiles_XKQD[number], keys_KLD[:, seen].transpose(1, 2))
        scores_KQL = scaled_scores(scores_KQL, q_SKGD, scores)
        scores_KGPL = scores_KQL.unflatten(1, (group, P))
        earlier = (tile - start) * P
        if bias_NT is not None:
            distances_PL = _distances(earlier, P, device).clamp_(min=0)
            scores_KGPL += bias_NT[:, distances_PL].unflatten(0, (heads, group))
        # Within the window, all keys before the tile are visible: a mask would waste memory.
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


@functools.lru_cache(maxsize=32)
def _mask(before: int, positions: int, window: Window, inside: int, device: torch.device) -> Tensor:
    """Return the mask [P, L], 0 or -infinity, for the scores of a tile with ``before`` keys before
    it. ``inside`` is the index of the tile's first query within its attention chunk."""
    distances = _distances(before, positions, device)
    hidden = distances < 0
    if window is not None:
        queries_P1 = torch.arange(positions, device=device)[:, None] + inside
        hidden |= queries_P1 - distances < first_key(queries_P1, window)
    return torch.zeros(distances.shape, device=device).masked_fill_(hidden, -torch.inf)


def _distances(before: int, positions: int, device: torch.device) -> Tensor:
    """Return distances [P, L] from a tile's queries back to its keys and ``before`` earlier
    keys."""
    queries = torch.arange(positions, device=device)[:, None] + before
    return queries - torch.arange(before + positions, device=device)
