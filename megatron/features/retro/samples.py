"""Samples with the neighbours of their chunks.

Shape suffixes: T tokens of a sample, L chunks of a sample, K neighbours of a chunk, R tokens of a
neighbour with its continuation, D documents of a sample, 2 the dataset and document of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.samples import NeighborText, Piece, SampleDataset, checked_index
from megatron.features.retro.batch import RetroSample
from megatron.features.retro.chunks import (
    DATASET,
    DOCUMENT,
    START,
    STOP,
    ChunkDatabase,
)
from megatron.features.retro.neighbors import NeighborTable


@dataclass(frozen=True)
class RetroSamples:
    """The first samples of another dataset, each with the nearest neighbours of its chunks. Samples
    after the last of the table have none.

    Args:
        text: the dataset.
        count: how many of its samples.
        table: the neighbours of their chunks.
        database: the text of the neighbours.
        neighbors: how many of each chunk are read (K).
        retrieved: chunks of text that are read of each: itself and what follows it.
        identified: whether samples say what documents they are from.
    """

    text: SampleDataset[Any]
    count: int
    table: NeighborTable
    database: ChunkDatabase
    neighbors: int
    retrieved: int
    identified: bool = False

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int, /) -> RetroSample:
        index = checked_index(index, len(self))
        chunks_LK = self.chunks(index)
        return RetroSample(
            self.text[index],
            self.database.tokens(chunks_LK, self.retrieved),
            chunks_LK,
            self._documents(index) if self.identified else None,
        )

    def origin(self, index: int, /) -> Sequence[Piece]:
        return self.text.origin(index)

    def chunks(self, index: int) -> npt.NDArray[np.int64]:
        """Numbers of the neighbours of a sample's chunks in the database, [L, K], nearest first;
        -1 where there are fewer."""
        if index >= len(self.table):
            return np.full((self.table.chunks_per_sample, self.neighbors), -1, np.int64)
        return self.table.rows(index)[:, : self.neighbors]

    def _documents(self, index: int) -> npt.NDArray[np.int64]:
        number = self.database.numbers.get
        pieces = self.text.origin(index)
        found = dict.fromkeys((number(piece.source, -1), piece.sequence) for piece in pieces)
        return np.array(list(found), np.int64)


def neighbor_texts(
    database: ChunkDatabase,
    chunks_LK: npt.NDArray[np.int64],
    retrieved: int,
    detokenize: Callable[[list[int]], str],
) -> list[NeighborText]:
    """The neighbours of a sample's chunks, numbers [L, K], for people: where they are from, and
    the text of ``retrieved`` chunks of each, which is what a model reads."""
    found = []
    for (chunk, rank), number in np.ndenumerate(chunks_LK):
        if number < 0:
            continue
        row = database.table[number].tolist()
        piece = Piece(database.sources[row[DATASET]], row[DOCUMENT], row[START], row[STOP])
        text = detokenize(database.tokens(number, retrieved).tolist())
        found.append(NeighborText(f"chunk {chunk + 1}, neighbour {rank + 1}", piece, text))
    return found


@dataclass(frozen=True)
class MockRetroSamples:
    """Samples of ``--mock-data`` with neighbours that are of no database: like the samples they
    count upwards (modulo the vocabulary) from random tokens, a function of (seed, part, index)
    alone."""

    text: SampleDataset[Any]
    shape_LKR: tuple[int, int, int]
    vocab_size: int
    seed: int
    part: int

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, index: int, /) -> RetroSample:
        rng = np.random.default_rng([self.seed, self.part, checked_index(index, len(self)), 1])
        chunks, neighbors, length = self.shape_LKR
        first_LK1 = rng.integers(self.vocab_size, size=(chunks, neighbors, 1))
        neighbors_LKR = (first_LK1 + np.arange(length)) % self.vocab_size
        return RetroSample(self.text[index], neighbors_LKR)

    def origin(self, index: int, /) -> Sequence[Piece]:
        return self.text.origin(index)
