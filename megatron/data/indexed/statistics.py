"""What is in an indexed dataset: counts and lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.data.indexed.reader import IndexedDataset, bin_path, idx_path

_BLOCK = 1 << 20
# Quantiles of longer arrays are those of this many entries, evenly spaced.
_EXACT_BELOW = 1 << 24
QUANTILES = (5, 25, 50, 75, 95)


@dataclass(frozen=True)
class Lengths:
    """How long things are."""

    count: int
    total: int
    smallest: int
    largest: int
    empty: int
    quantiles: dict[int, int]
    """Percent of the things that are at most as long, to that length."""

    @property
    def mean(self) -> float:
        """0 where there is nothing."""
        return self.total / self.count if self.count else 0.0

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        quantiles = {f"{percent}%": length for percent, length in self.quantiles.items()}
        return vars(self) | {"mean": self.mean, "quantiles": quantiles}


@dataclass(frozen=True)
class Contents:
    """What an indexed dataset holds."""

    prefix: str
    dtype: str
    bin_bytes: int
    idx_bytes: int
    multimodal: bool
    sequence_tokens: Lengths
    document_tokens: Lengths
    document_sequences: Lengths

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "prefix": self.prefix,
            "documents": self.document_tokens.count,
            "sequences": self.sequence_tokens.count,
            "tokens": self.sequence_tokens.total,
            "dtype": self.dtype,
            "bin_bytes": self.bin_bytes,
            "idx_bytes": self.idx_bytes,
            "multimodal": self.multimodal,
            "tokens_per_sequence": self.sequence_tokens.to_json(),
            "tokens_per_document": self.document_tokens.to_json(),
            "sequences_per_document": self.document_sequences.to_json(),
        }


def contents(dataset: IndexedDataset) -> Contents:
    """Counts and lengths, from the .idx alone.

    Raises:
        ValueError: the .idx is damaged; the message names it.
    """
    dataset.verify()
    bounds = dataset.document_indices
    size = dataset.dtype.itemsize
    end = np.int64(dataset.num_tokens * size)

    def bytes_before(sequences: np.ndarray) -> np.ndarray:
        """Bytes in front of each of some sequences; one behind the last is their end."""
        inside = sequences < len(dataset)
        starts = np.full(len(sequences), end)
        starts[inside] = dataset.sequence_offsets[sequences[inside]]
        return starts

    documents = _Gatherer(dataset.num_documents)
    per_document = _Gatherer(dataset.num_documents)
    for start in range(0, dataset.num_documents, _BLOCK):
        block = bounds[start : start + _BLOCK + 1]
        documents.add(np.diff(bytes_before(block)) // size)
        per_document.add(np.diff(block))
    sequences = _Gatherer(len(dataset))
    for start in range(0, len(dataset), _BLOCK):
        sequences.add(dataset.sequence_lengths[start : start + _BLOCK])
    return Contents(
        dataset.prefix,
        dataset.dtype.name,
        bin_path(dataset.prefix).stat().st_size,
        idx_path(dataset.prefix).stat().st_size,
        dataset.modes is not None,
        sequences.lengths(),
        documents.lengths(),
        per_document.lengths(),
    )


class _Gatherer:
    """Statistics of an array that comes in blocks; holds a sample of it."""

    def __init__(self, count: int) -> None:
        self._step = -(-count // _EXACT_BELOW) or 1
        self._sample: list[np.ndarray] = []
        self._seen = self._total = self._empty = 0
        self._extremes: list[int] = []

    def add(self, values: np.ndarray) -> None:
        """The next block; not empty."""
        self._sample.append(values[-self._seen % self._step :: self._step].astype(np.int64))
        self._extremes = [
            min([*self._extremes[:1], int(values.min())]),
            max([*self._extremes[1:], int(values.max())]),
        ]
        self._total += int(values.sum(dtype=np.int64))
        self._empty += int(np.count_nonzero(values == 0))
        self._seen += len(values)

    def lengths(self) -> Lengths:
        """Of all blocks."""
        if not self._seen:
            return Lengths(0, 0, 0, 0, 0, dict.fromkeys(QUANTILES, 0))
        sample = np.concatenate(self._sample)
        found = np.percentile(sample, QUANTILES, method="inverted_cdf").tolist()
        quantiles = dict(zip(QUANTILES, map(int, found), strict=True))
        smallest, largest = self._extremes
        return Lengths(self._seen, self._total, smallest, largest, self._empty, quantiles)
