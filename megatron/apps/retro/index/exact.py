"""An index of vectors, and the exact one: every query is compared with every vector.

The candidates are found by matrix products in float32, |y|^2 - 2 x y; the largest error of these
products says which vectors may be among the nearest, and these are compared again in float64. So
the result depends neither on the library of the products, nor on the number of threads or the size
of blocks: the nearest by distance, and of equal distances the one added first.

Shape suffixes: N vectors of the index, Q queries, D elements of a vector, E bytes of a
vector's code, K neighbours, C candidates of all queries.
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
"""Numbers of the nearest vectors of each query, nearest first, [Q, K], -1 where there are fewer;
their squared Euclidean distances, infinite where there are fewer."""

_HEADER = struct.Struct("<4siqqq?iQ")
"""The header of faiss's IndexFlatL2: name, width, vectors, two numbers without a meaning, whether
it is trained, metric, elements of all vectors."""
_NAME, _UNUSED, _L2 = b"IxF2", 1 << 20, 1
_QUERIES, _VECTORS = 1024, 16384  # 64 MiB of products at a time
_EXACT_ELEMENTS = {"cpu": 2**17, "cuda": 2**24}
"""Elements of candidates compared in float64 at a time: on processors, as fit into a cache."""


class VectorIndex(Protocol):
    """Vectors, numbered from 0 in the order in which they were added, and nearest-neighbour search
    by Euclidean distance. Files have the format of faiss."""

    def __len__(self) -> int: ...

    def train(self, vectors_ND: Vectors) -> None:
        """Learns clusters and codes, if it has any; before the first vector is added. ValueError if
        there are too few vectors."""

    def add(self, vectors_ND: Vectors) -> None: ...

    def encode(self, vectors_ND: Vectors) -> npt.NDArray[np.uint8]:
        """The codes [N, E] of vectors, by which :meth:`add_codes` adds them."""

    def add_codes(self, codes_NE: npt.NDArray[np.uint8]) -> None:
        """Adds vectors by their codes; the index is as if the vectors were added."""

    def holds(self, first: int, codes_NE: npt.NDArray[np.uint8]) -> bool:
        """True if the vectors from number ``first`` on have these codes."""

    def search(self, queries_QD: Vectors, k: int) -> Nearest: ...

    def save(self, path: Path) -> None:
        """Writes a file, which appears when it is complete. OSError if it cannot be written."""

    def load(self, path: Path) -> None:
        """Takes what a file has. ValueError if it is damaged or of another index."""


class ExactIndex:
    """The vectors themselves, as ``IndexFlatL2`` of faiss has them, in files of the same format.
    A loaded file stays on the disk, mapped into memory; so do mapped arrays that are added."""

    def __init__(self, width: int, device: torch.device | str = "cpu") -> None:
        """``device`` computes the products."""
        self.width = width
        self._device = torch.device(device)
        self._parts: list[Vectors] = []

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)

    def train(self, vectors_ND: Vectors) -> None:
        """Nothing is learned."""

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
        """Memory does not depend on the number of vectors."""
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
        # A copy: mapped files are read-only, and rows of faiss's are not aligned.
        return torch.from_numpy(np.array(array, np.float32, order="C")).to(self._device)

    def _blocks(self) -> Iterator[tuple[int, Vectors]]:
        """Runs of vectors with the number of the first."""
        first = 0
        for part in self._parts:
            for start in range(0, len(part), _VECTORS):
                yield first + start, part[start : start + _VECTORS]
            first += len(part)

    def vectors(self, numbers_C: npt.NDArray[np.int64]) -> Vectors:
        """Vectors [C, D] by number."""
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
    """Vectors that may be among the nearest of some queries, by their scores |y|^2 - 2 x y."""

    def __init__(self, queries_QD: Tensor, k: int) -> None:
        if not bool(queries_QD.isfinite().all()):
            raise ValueError("a query has elements that are not finite")
        device = queries_QD.device
        self._queries_QD, self._k = queries_QD, k
        self._lengths_Q = queries_QD.norm(dim=1)
        self._worst_Q = torch.full((len(queries_QD),), torch.inf, device=device)
        """The k nearest of the vectors compared have at most this score."""
        self._queries_C = torch.empty(0, dtype=torch.int64, device=device)
        self._numbers_C = torch.empty(0, dtype=torch.int64, device=device)
        self._scores_C = torch.empty(0, device=device)
        self._errors_C = torch.empty(0, device=device)

    def compare(self, first: int, vectors_ND: Tensor) -> None:
        """Takes the vectors of a run, numbered from ``first`` on, that may be among the nearest."""
        squares_N = vectors_ND.double().square().sum(dim=1).float()
        largest = squares_N.max()
        if not bool(largest.isfinite()):
            raise ValueError(
                f"one of the vectors {first} to {first + len(vectors_ND) - 1} has elements that "
                "are not finite"
            )
        scores_QN = torch.addmm(squares_N, self._queries_QD, vectors_ND.T, alpha=-2)
        # Added in any order, a product of D elements is off by at most D eps/2 |x| |y|; rounding
        # |y|^2 and the sum adds a few eps/2 of the terms. Here twice that.
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
        """Drop vectors that are certainly farther away than k others."""
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
        """The k nearest of each query; ``take`` gives vectors by number."""
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
    """The place of each element in its row, from 0; ``rows_C`` ascends."""
    counts_Q = torch.bincount(rows_C, minlength=rows)
    starts_Q = counts_Q.cumsum(0) - counts_Q
    return torch.arange(len(rows_C), device=rows_C.device) - starts_Q[rows_C]
