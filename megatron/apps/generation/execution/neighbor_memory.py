"""Retrieved text of a model that attends to the neighbours of chunks; a page is a chunk.

Shapes: X pages, P positions of a page, H hidden, K key and value heads, E tokens of a chunk's
neighbours together, D head width, T tokens of a pass, C chunks that end in it, N query heads, G =
N / K query heads that share one.
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
    """The neighbours of a page on one rank: their keys and values in the blocks with these numbers,
    and, with ``states``, the hidden states that their encoder reads of the chunk."""

    blocks: tuple[int, ...]
    states: bool
    heads: int
    width: int
    hidden: int
    spec: NeighborSpec
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """(2 x blocks x heads x tokens of neighbours x width + chunk x hidden, where the encoder
        is) x bytes of a number."""
        numbers = 2 * len(self.blocks) * self.heads * self.spec.tokens * self.width
        numbers += self.states * self.spec.chunk_length * self.hidden
        return numbers * self.dtype.itemsize


class NeighborMemory:
    """Keys and values [blocks, 2, X, K, E, D] of the neighbours in all pages of a process, and the
    states of chunks [X, P, H]."""

    def __init__(self, shape: NeighborShape, pages: int, device: torch.device) -> None:
        spec = shape.spec
        self.shape, self.device = shape, device
        self.places = {layer: place for place, layer in enumerate(shape.blocks)}
        size = (len(shape.blocks), 2, pages, shape.heads, spec.tokens, shape.width)
        self.pool = torch.empty(size, dtype=shape.dtype, device=device)
        states = (pages if shape.states else 0, spec.chunk_length, shape.hidden)
        self.states_XPH = torch.empty(states, dtype=shape.dtype, device=device)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """(from, to), in order."""
        for source, target in copies:
            self.pool[:, :, target] = self.pool[:, :, source]
            if self.shape.states:
                self.states_XPH[target] = self.states_XPH[source]


class _Tile(NamedTuple):
    """Rows of a pass that read the neighbours of the chunk in ``page``; the first is at ``offset``
    of the positions that do."""

    rows: slice
    offset: int
    page: int
    decoding: bool


class NeighborCache:
    """The neighbours of one pass (a `features.retro.neighbors.NeighborStore`): the pages of the
    chunks that ``ended`` in it, and the tokens [1, C, neighbours, R] of their neighbours."""

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
        """See `NeighborStore.chunk_states`; states of this pass are written first."""
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
        """See `NeighborStore.attend`. Queries of a prompt to the neighbours of a chunk are one
        GEMM, padded with zeros to a chunk: the same however a prompt is cut. Each generated token
        is a separate GEMM."""
        keys, values = self._memory.pool[self._memory.places[layer]]
        for page, encoder_1EH in zip(self.ended, self.by_chunk(encoder_1TH), strict=True):
            # A GEMM of one shape for every chunk.
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
    """Return the chunks of a sequence whose last token is in a part."""
    return range(part.start // chunk_length, (part.start + len(part.tokens)) // chunk_length)


def _tiles(part: SequencePart, row: int, chunk_length: int) -> list[_Tile]:
    """Return the tiles of a part whose first token is in a row. The neighbours of a chunk are read
    by a chunk's length of tokens, starting at its last token."""
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
