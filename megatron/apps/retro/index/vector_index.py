"""What an index of vectors does: the nearest chunks of the database to a vector.

Shape suffixes: N vectors of the index, Q queries, D elements of a vector, E bytes of
a vector's code, K neighbours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]


class VectorIndex(Protocol):
    """Vectors, numbered from 0 in the order in which they were added, and the search for those at
    the smallest Euclidean distance."""

    def __len__(self) -> int:
        """How many vectors were added."""

    def train(self, vectors_ND: Vectors) -> None:
        """Learns clusters and codes, if it has any; before the first vector is added. Raises
        ValueError if there are too few vectors."""

    def add(self, vectors_ND: Vectors) -> None:
        """Adds vectors behind those that it has."""

    def encode(self, vectors_ND: Vectors) -> npt.NDArray[np.uint8]:
        """The codes [N, E] of vectors, by which :meth:`add_codes` adds them."""

    def add_codes(self, codes_NE: npt.NDArray[np.uint8]) -> None:
        """Adds vectors by their codes; the index is as if the vectors were added."""

    def holds(self, first: int, codes_NE: npt.NDArray[np.uint8]) -> bool:
        """Whether the vectors from number ``first`` on have these codes."""

    def search(
        self, queries_QD: Vectors, k: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """The nearest vectors of each query.

        Returns:
            numbers_QK: numbers of vectors, nearest first; -1 where there are fewer.
            distances_QK: their squared Euclidean distances; infinite where there are fewer.
        """

    def save(self, path: Path) -> None:
        """Writes a file in the format of faiss, which appears when it is complete. Raises OSError
        if it cannot be written."""

    def load(self, path: Path) -> None:
        """Takes what a file has. Raises ValueError if it is damaged or of another index."""
