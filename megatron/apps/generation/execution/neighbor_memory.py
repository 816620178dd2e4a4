"""Cache of retrieved text for models that attend to neighbours of chunks (RETRO). A page is one
chunk.

Shapes: X pages, P positions of a page, H hidden, K key and value heads, E tokens of all neighbours
of a chunk, D head width, T tokens of a pass, C chunks that end in the pass, N query heads, G = N /
K query heads that share a key and value head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.apps.generation.execution.paged_attention import scaled_scores, softmax
from megatron.apps.generation.request import SequencePart
from megatron.features.retro.neighbors import NeighborSpec
from megatron.model.attention_masks import AttentionScoring


@dataclass(frozen=True)
class NeighborShape:
    """Shape of the cached neighbours of a page on one rank: their keys and values in ``blocks``
    and, if ``states`` is set, the chunk's hidden states, which the encoder reads."""

    blocks: tuple[int, ...]
    states: bool
    heads: int
    width: int
    hidden: int
    spec: NeighborSpec
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of a page: (2 x blocks x heads x neighbour tokens x width + chunk length x hidden)
        x bytes per element. The second term applies only to the rank with the encoder."""
        numbers = 2 * len(self.blocks) * self.heads * self.spec.tokens * self.width
        numbers += self.states * self.spec.chunk_length * self.hidden
        return numbers * self.dtype.itemsize


class NeighborMemory:
    """Neighbours' keys and values [blocks, 2, X, K, E, D] for all pages of a process, and the
    chunks' hidden states [X, P, H]."""

    def __init__(self, shape: NeighborShape, pages: int, device: torch.device) -> None:
        spec = shape.spec
        self.shape, self.device = shape, device
        self.places = {layer: place for place, layer in enumerate(shape.blocks)}
        size = (len(shape.blocks), 2, pages, shape.heads, spec.tokens, shape.width)
        self.pool = torch.empty(size, dtype=shape.dtype, device=device)
        states = (pages if shape.states else 0, spec.chunk_length, shape.hidden)
        self.states_XPH = torch.empty(states, dtype=shape.dtype, device=device)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages. ``copies`` are pairs (from, to), applied in order."""
        for source, target in copies:
            self.pool[:, :, target] = self.pool[:, :, source]
            if self.shape.states:
                self.states_XPH[target] = self.states_XPH[source]


class _Tile(NamedTuple):
    """Rows of a pass that attend to the neighbours of the chunk in ``page``. ``offset`` is the
    index of the first row among all positions that attend to these neighbours."""

    rows: slice
    offset: int
    page: int
    decoding: bool


class NeighborCache:
    """Neighbour cache of one pass (a `features.retro.neighbors.NeighborStore`). ``ended`` contains
    the pages of the chunks that end in the pass, and ``neighbors_BLKR`` the token ids of their
    neighbours, [1, C, neighbours, R]."""

    def __init__(self, memory: NeighborMemory, parts: Sequence[SequencePart]) -> None:
        self._memory, spec = memory, memory.shape.spec
        P = spec.chunk_length
        self._tiles: list[_Tile] = []
        written, row = [], 0
        ended: list[int] = []
        tokens: list[tuple[int, ...]] = []
        for part in parts:
            positions = np.arange(part.start, part.start + len(part.tokens))
            written.append(np.array(part.pages)[positions // P] * P + positions % P)
            chunks = ending(part, P)
            assert len(chunks) == len(part.neighbors), f"{part}: a chunk lacks its neighbours"
            ended += [part.pages[chunk] for chunk in chunks]
            tokens += part.neighbors
            self._tiles += _tiles(part, row, P)
            row += len(part.tokens)
        self.ended = tuple(ended)
        self._written_T = torch.from_numpy(np.concatenate(written)).to(memory.device)
        shape = (1, len(ended), spec.neighbors, spec.neighbor_length)
        self.neighbors_BLKR = torch.tensor(tokens, dtype=torch.int64, device=memory.device)
        self.neighbors_BLKR = self.neighbors_BLKR.reshape(shape)

    def chunk_states(self, x_1TH: Tensor) -> Tensor:
        """See `NeighborStore.chunk_states`. Stores this pass's hidden states before reading."""
        states_XPH = self._memory.states_XPH
        flat = states_XPH.view(-1, states_XPH.shape[-1])
        flat.index_copy_(0, self._written_T, x_1TH[0, : len(self._written_T)])
        return states_XPH[list(self.ended)].flatten(0, 1).unsqueeze(0)

    def by_chunk(self, x_1TH: Tensor | None) -> Sequence[Tensor]:
        """See `NeighborStore.by_chunk`."""
        if not self.ended:
            return ()
        assert x_1TH is not None
        return x_1TH.chunk(len(self.ended), 1)

    def attend(
        self,
        encoder_1TH: Tensor | None,
        layer: int,
        q_1SND: Tensor,
        keys_and_values: Callable[[Tensor], tuple[Tensor, Tensor]],
        scores: AttentionScoring,
        sinks_N: Tensor | None,
    ) -> Tensor:
        """See `NeighborStore.attend`. All queries of a prompt to the neighbours of one chunk are
        one GEMM, padded with zeros to the chunk length, so that its shape does not depend on how
        the prompt is split. Each generated token is a separate GEMM."""
        keys, values = self._memory.pool[self._memory.places[layer]]
        for page, encoder_1EH in zip(self.ended, self.by_chunk(encoder_1TH), strict=True):
            # One GEMM per chunk, always of the same shape, so that results do not depend on the
            # number of chunks.
            for pool, new_1EKD in zip((keys, values), keys_and_values(encoder_1EH), strict=True):
                pool[page] = new_1EKD[0].transpose(0, 1)
        y_TND, P = torch.zeros_like(q_1SND[0]), self._memory.shape.spec.chunk_length
        for tile in self._tiles:
            q_SKGD = q_1SND[0, tile.rows].unflatten(1, (keys.shape[1], -1))
            count, positions = len(q_SKGD), 1 if tile.decoding else P
            first = 0 if tile.decoding else tile.offset
            padded = q_SKGD.new_zeros(positions, *q_SKGD.shape[1:])
            padded[first : first + count] = q_SKGD
            q_KQD = padded.permute(1, 2, 0, 3).flatten(1, 2)
            products_KQE = torch.bmm(q_KQD, keys[tile.page].transpose(1, 2))
            weights_KQE = softmax(scaled_scores(products_KQE, q_KQD, scores), sinks_N)
            y_KQD = torch.bmm(weights_KQE.to(values.dtype), values[tile.page])
            y_SND = y_KQD.unflatten(1, (-1, positions)).permute(2, 0, 1, 3).flatten(1, 2)
            y_TND[tile.rows] = y_SND[first : first + count]
        return y_TND.unsqueeze(0)


def ending(part: SequencePart, chunk_length: int) -> range:
    """Return the indices of the sequence's chunks whose last token is in ``part``."""
    return range(part.start // chunk_length, (part.start + len(part.tokens)) // chunk_length)


def _tiles(part: SequencePart, row: int, chunk_length: int) -> list[_Tile]:
    """Return the tiles of a part whose first token is in row ``row``. A chunk's neighbours are read
    by ``chunk_length`` tokens, starting with the last token of the chunk."""
    tiles, position, end = [], part.start, part.start + len(part.tokens)
    while position < end:
        chunk, offset = divmod(position + 1, chunk_length)
        stop = position + 1 if part.decoding else min(end, (chunk + 1) * chunk_length - 1)
        if chunk:
            first = row + position - part.start
            rows = slice(first, first + stop - position)
            tiles.append(_Tile(rows, offset, part.pages[chunk - 1], part.decoding))
        position = stop
    return tiles
