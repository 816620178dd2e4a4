"""How many of the nearest chunks an index finds.

Some chunks of the database are searched for in the index, and exactly: while a block of vectors is
in memory for the index, each of these chunks is compared with all of them. So the exact neighbours
cost no second reading of the database, and come from as many processes as embed it. A chunk is not
its own neighbour.

Shape suffixes: Q chunks that are searched for, N vectors of a block, D elements of a vector, K
neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron.apps.retro.index.exact import ExactIndex
from megatron.apps.retro.index.vector_index import VectorIndex, Vectors
from megatron.apps.retro.index.vectors import chunk_vectors
from megatron.apps.retro.preprocessing import Preprocessing
from megatron.features.retro.hdf5 import read_array

RECALL_AT = (2, 20)
"""What a model reads, and what the stage of neighbours keeps."""
SEARCHED = 4 * max(RECALL_AT)
"""Exact neighbours that are kept, so that those at equal distances are known, too."""
_NEAREST, _DISTANCES = "nearest", "nearest_distances"


class RecallSample:
    """Chunks, spread over the database, whose neighbours are found exactly."""

    def __init__(self, work: Preprocessing, chunks: int, count: int) -> None:
        """
        Args:
            work: the project.
            chunks: how many chunks of the database the index has.
            count: how many of them are searched for.
        """
        self._work = work
        count = min(count, chunks)
        self.chunks_Q = np.arange(count, dtype=np.int64) * chunks // max(count, 1)

    @cached_property
    def _vectors_QD(self) -> Vectors:
        return chunk_vectors(self._work, self.chunks_Q)

    def nearest(self, first: int, vectors_ND: Vectors) -> dict[str, np.ndarray]:
        """The exact neighbours among a block of vectors, the first of which is chunk ``first``, for
        the block's file."""
        index = ExactIndex(vectors_ND.shape[1])
        index.add(vectors_ND)
        numbers_QK, distances_QK = index.search(self._vectors_QD, SEARCHED)
        numbers_QK[numbers_QK >= 0] += first
        return {_NEAREST: numbers_QK, _DISTANCES: distances_QK}

    def recall(self, index: VectorIndex, blocks: Sequence[Path]) -> dict[int, float]:
        """The share of the k nearest chunks that are among the k first of the index, for each k of
        :data:`RECALL_AT`."""
        numbers = np.concatenate([read_array(path, _NEAREST) for path in blocks], axis=1)
        distances = np.concatenate([read_array(path, _DISTANCES) for path in blocks], axis=1)
        exact_QN, distances_QN = nearest_others(self.chunks_Q, numbers, distances)
        found_QK, _ = index.search(self._vectors_QD, max(RECALL_AT) + 1)
        return recall_at(exact_QN, distances_QN, without_own(self.chunks_Q, found_QK))


def nearest_others(
    chunks_Q: npt.NDArray[np.int64],
    numbers_QN: npt.NDArray[np.int64],
    distances_QN: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The nearest of each row, in their order, without the chunk that is searched for: -1 at the
    end of its row instead."""
    numbers_QN = np.where(numbers_QN == chunks_Q[:, None], -1, numbers_QN)
    distances_QN = np.where(numbers_QN < 0, np.float32(np.inf), distances_QN)
    order = np.lexsort((numbers_QN, distances_QN))[:, :SEARCHED]
    return np.take_along_axis(numbers_QN, order, 1), np.take_along_axis(distances_QN, order, 1)


def without_own(
    chunks_Q: npt.NDArray[np.int64], numbers_QN: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The first K = max(RECALL_AT) of each row without the chunk that is searched for."""
    order = np.argsort(numbers_QN == chunks_Q[:, None], axis=1, kind="stable")
    return np.take_along_axis(numbers_QN, order[:, : max(RECALL_AT)], axis=1)


def recall_at(
    exact_QN: npt.NDArray[np.int64],
    distances_QN: npt.NDArray[np.float32],
    found_QK: npt.NDArray[np.int64],
) -> dict[int, float]:
    """The share of the k nearest that are among the first k found, for each k of
    :data:`RECALL_AT`. One at the same distance as the k-th is as good; -1 is no neighbour."""
    shares = {}
    for k in RECALL_AT:
        last_Q1 = distances_QN[:, min(k, exact_QN.shape[1]) - 1, None]
        near_QN = (exact_QN >= 0) & (distances_QN <= last_Q1)
        hits_QKN = (found_QK[:, :k, None] == exact_QN[:, None]) & near_QN[:, None]
        wanted = np.minimum((exact_QN >= 0).sum(1), k).sum()
        shares[k] = float(hits_QKN.sum() / max(wanted, 1))
    return shares
