"""Interface of a vector index, and the exact index, which compares every query with every vector.

Candidates are found with float32 matrix products, as |y|^2 - 2 x y. A bound on the error of these
products determines which vectors may be among the nearest; these are compared again in float64. The
result therefore does not depend on the matrix library, the number of threads or the block size. It
is ordered by distance, and among equal distances by when vectors were added.

Shape suffixes: N vectors of the index, Q queries, D elements of a vector, E bytes of a vector's
code, K neighbours, C candidates of all queries.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.util.files import replacing, sync

Vectors = npt.NDArray[np.float32]
Nearest = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]
"""Result of a search, nearest first: numbers of the vectors, [Q, K], and their squared Euclidean
distances. If fewer than K exist, the remaining numbers are -1 and distances infinite."""

_HEADER = struct.Struct("<4siqqq?iQ")
"""Header of faiss's IndexFlatL2: name, width, number of vectors, two unused numbers, whether the
index is trained, metric, number of elements of all vectors."""
_NAME, _UNUSED, _L2 = b"IxF2", 1 << 20, 1
_QUERIES, _VECTORS = 1024, 16384  # block sizes: products of a block take 64 MiB
_EXACT_ELEMENTS = {"cpu": 2**17, "cuda": 2**24}
"""Number of elements of candidates to compare in float64 at a time. On CPUs they should fit in the
cache."""


class VectorIndex(Protocol):
    """Index of vectors, numbered from 0 in the order in which they are added, with
    nearest-neighbour search by Euclidean distance. Files have faiss's format."""

    def __len__(self) -> int: ...

    def train(self, vectors_ND: Vectors) -> None:
        """Train clusters and codes, if the index has any. Must be called before vectors are added.
        Raises ValueError if there are too few vectors."""

    def add(self, vectors_ND: Vectors) -> None: ...

    def encode(self, vectors_ND: Vectors) -> npt.NDArray[np.uint8]:
        """Return the codes [N, E] of vectors, for :meth:`add_codes`."""

    def add_codes(self, codes_NE: npt.NDArray[np.uint8]) -> None:
        """Add vectors, given as codes. The result equals that of adding the vectors."""

    def holds(self, first: int, codes_NE: npt.NDArray[np.uint8]) -> bool:
        """Return whether the vectors from number ``first`` on have these codes."""

    def search(self, queries_QD: Vectors, k: int) -> Nearest: ...

    def save(self, path: Path) -> None:
        """Write the index to a file atomically. Raises OSError if it cannot be written."""

    def load(self, path: Path) -> None:
        """Replace the content of the index by a file. Raises ValueError if the file is damaged or
        belongs to another index."""


class ExactIndex:
    """Index that stores the vectors themselves, in the format of faiss's ``IndexFlatL2``. A loaded
    file is not copied but mapped into memory. Arrays are added without copying, too."""

    def __init__(self, width: int, device: torch.device | str = "cpu") -> None:
        """Create an empty index. Matrix products are computed on ``device``."""
        self.width = width
        self._device = torch.device(device)
        self._parts: list[Vectors] = []

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)

    def train(self, vectors_ND: Vectors) -> None:
        """Do nothing, since an exact index needs no training."""

    def add(self, vectors_ND: Vectors) -> None:
        if vectors_ND.ndim != 2 or vectors_ND.shape[1] != self.width:
            raise ValueError(
                f"vectors of shape {vectors_ND.shape} do not fit an index of width {self.width}"
            )
        if len(vectors_ND):
            self._parts.append(vectors_ND)

    def encode(self, vectors_ND: Vectors) -> npt.NDArray[np.uint8]:
        return np.ascontiguousarray(vectors_ND, "<f4").view(np.uint8)

    def add_codes(self, codes_NE: npt.NDArray[np.uint8]) -> None:
        self.add(codes_NE.view("<f4"))

    def holds(self, first: int, codes_NE: npt.NDArray[np.uint8]) -> bool:
        numbers = np.arange(first, min(first + len(codes_NE), len(self)))
        return np.array_equal(self.encode(self.vectors(numbers)), codes_NE)

    def search(self, queries_QD: Vectors, k: int) -> Nearest:
        """Search in blocks, so that memory use does not depend on the number of vectors."""
        blocks = range(0, len(queries_QD), _QUERIES)
        nearest = [self._search_block(queries_QD[start : start + _QUERIES], k) for start in blocks]
        empty = np.empty((0, k), np.int64), np.empty((0, k), np.float32)
        numbers, distances = zip(empty, *nearest, strict=True)
        return np.concatenate(numbers), np.concatenate(distances)

    def _search_block(self, queries_QD: Vectors, k: int) -> Nearest:
        candidates = _Candidates(self._tensor(queries_QD), k)
        for start, vectors_ND in self._blocks():
            candidates.compare(start, self._tensor(vectors_ND))
        return candidates.nearest(lambda numbers_C: self._tensor(self.vectors(numbers_C)))

    def _tensor(self, array: Vectors) -> Tensor:
        # Copy: mapped files are read-only, and rows in faiss files are not aligned.
        return torch.from_numpy(np.array(array, np.float32, order="C")).to(self._device)

    def _blocks(self) -> Iterator[tuple[int, Vectors]]:
        """Yield blocks of vectors, each preceded by the number of its first vector."""
        first = 0
        for part in self._parts:
            for start in range(0, len(part), _VECTORS):
                yield first + start, part[start : start + _VECTORS]
            first += len(part)

    def vectors(self, numbers_C: npt.NDArray[np.int64]) -> Vectors:
        """Return the vectors with the given numbers, [C, D]."""
        vectors_CD = np.empty((len(numbers_C), self.width), np.float32)
        first = 0
        for part in self._parts:
            here = (numbers_C >= first) & (numbers_C < first + len(part))
            vectors_CD[here] = part[numbers_C[here] - first]
            first += len(part)
        return vectors_CD

    def save(self, path: Path) -> None:
        count = len(self)
        header = (_NAME, self.width, count, _UNUSED, _UNUSED, True, _L2, count * self.width)
        with replacing(path) as part, part.open("xb") as file:
            file.write(_HEADER.pack(*header))
            for _, vectors_ND in self._blocks():
                file.write(np.ascontiguousarray(vectors_ND, "<f4").data)
            sync(file)

    def load(self, path: Path) -> None:
        with path.open("rb") as file:
            head = file.read(_HEADER.size)
        size = path.stat().st_size
        if len(head) < _HEADER.size:
            raise ValueError(f"{path} is incomplete; remove it and repeat the stage index-add")
        name, width, count, _, _, _, metric, elements = _HEADER.unpack(head)
        if name != _NAME or metric != _L2:
            raise ValueError(f"{path} is not an index of the type Flat with Euclidean distances")
        if width != self.width:
            raise ValueError(
                f"{path} has vectors of width {width}, the embedder gives {self.width}; "
                "remove it and repeat the stage index-add"
            )
        if elements != count * width or size != _HEADER.size + 4 * elements:
            raise ValueError(f"{path} is damaged; remove it and repeat the stage index-add")
        self._parts = []
        if count:
            self._parts.append(np.memmap(path, "<f4", "r", _HEADER.size, (count, width)))


class _Candidates:
    """Vectors that may be among the nearest to some queries, with scores |y|^2 - 2 x y."""

    def __init__(self, queries_QD: Tensor, k: int) -> None:
        if not bool(queries_QD.isfinite().all()):
            raise ValueError("a query has elements that are not finite")
        device = queries_QD.device
        self._queries_QD, self._k = queries_QD, k
        self._lengths_Q = queries_QD.norm(dim=1)
        self._worst_Q = torch.full((len(queries_QD),), torch.inf, device=device)
        """Upper bound on the score of the k-th nearest vector so far, for each query."""
        self._queries_C = torch.empty(0, dtype=torch.int64, device=device)
        self._numbers_C = torch.empty(0, dtype=torch.int64, device=device)
        self._scores_C = torch.empty(0, device=device)
        self._errors_C = torch.empty(0, device=device)

    def compare(self, first: int, vectors_ND: Tensor) -> None:
        """Add the vectors of a block that may be among the nearest. ``first`` is the number of the
        block's first vector."""
        squares_N = vectors_ND.double().square().sum(dim=1).float()
        largest = squares_N.max()
        if not bool(largest.isfinite()):
            raise ValueError(
                f"one of the vectors {first} to {first + len(vectors_ND) - 1} has elements that "
                "are not finite"
            )
        scores_QN = torch.addmm(squares_N, self._queries_QD, vectors_ND.T, alpha=-2)
        # Error bound: summed in any order, a product of D elements is off by at most D eps/2 |x|
        # |y|. Rounding |y|^2 and the sum adds a few eps/2 of the terms. The bound used is twice
        # that.
        products_Q = self._lengths_Q * largest.sqrt()
        eps = torch.finfo(torch.float32).eps
        errors_Q = eps * ((2 * self._queries_QD.shape[1] + 4) * products_Q + 2 * largest)
        if bool(self._worst_Q.isinf().any()) and scores_QN.shape[1] >= self._k:
            kth_Q = scores_QN.kthvalue(self._k, dim=1).values + errors_Q
            self._worst_Q = torch.minimum(self._worst_Q, kth_Q)
        within_QN = scores_QN <= (self._worst_Q + errors_Q)[:, None]
        rows_C, columns_C = within_QN.nonzero(as_tuple=True)
        self._queries_C = torch.cat([self._queries_C, rows_C])
        self._numbers_C = torch.cat([self._numbers_C, columns_C + first])
        self._scores_C = torch.cat([self._scores_C, scores_QN[rows_C, columns_C]])
        self._errors_C = torch.cat([self._errors_C, errors_Q[rows_C]])
        self._drop()

    def _drop(self) -> None:
        """Drop the vectors that are certainly farther away than k other vectors."""
        largest_C = self._scores_C + self._errors_C
        order_C = largest_C.argsort()
        order_C = order_C[self._queries_C[order_C].argsort(stable=True)]
        rows_C = self._queries_C[order_C]
        kth = _places(rows_C, len(self._worst_Q)) == self._k - 1
        self._worst_Q[rows_C[kth]] = torch.minimum(
            self._worst_Q[rows_C[kth]], largest_C[order_C[kth]]
        )
        kept = self._scores_C - self._errors_C <= self._worst_Q[self._queries_C]
        self._queries_C, self._numbers_C = self._queries_C[kept], self._numbers_C[kept]
        self._scores_C, self._errors_C = self._scores_C[kept], self._errors_C[kept]

    def nearest(self, take: Callable[[npt.NDArray[np.int64]], Tensor]) -> Nearest:
        """Return the k nearest vectors of each query. ``take`` returns vectors by number."""
        (count, width), device = self._queries_QD.shape, self._queries_QD.device
        runs = range(0, len(self._queries_C), max(1, _EXACT_ELEMENTS[device.type] // width))
        numbers_C = self._numbers_C.cpu().numpy()
        distances = [torch.empty(0, dtype=torch.float64)]
        for start in runs:
            run = slice(start, start + runs.step)
            differences_CD = take(numbers_C[run]).double()
            differences_CD -= self._queries_QD[self._queries_C[run]]
            distances.append(differences_CD.square_().sum(dim=1).cpu())
        distances_C = torch.cat(distances).numpy()
        rows_C = self._queries_C.cpu().numpy()
        order_C = np.lexsort((numbers_C, distances_C, rows_C))
        rows_C = rows_C[order_C]
        places_C = _places(torch.from_numpy(rows_C), count).numpy()
        kept = places_C < self._k
        where = rows_C[kept], places_C[kept]
        numbers_QK = np.full((count, self._k), -1, np.int64)
        distances_QK = np.full((count, self._k), np.inf, np.float32)
        numbers_QK[where] = numbers_C[order_C[kept]]
        distances_QK[where] = distances_C[order_C[kept]]
        return numbers_QK, distances_QK


def _places(rows_C: Tensor, rows: int) -> Tensor:
    """Return the index of each element within its row, from 0. ``rows_C`` must be sorted."""
    counts_Q = torch.bincount(rows_C, minlength=rows)
    starts_Q = counts_Q.cumsum(0) - counts_Q
    return torch.arange(len(rows_C), device=rows_C.device) - starts_Q[rows_C]
