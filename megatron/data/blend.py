"""Weighted blends of datasets, in Megatron's order.

Sample i is taken from the dataset d with the largest weight_d * max(i, 1) - taken_d, where taken_d
is the number of samples already taken from d. On a tie the first dataset wins. The loop over
samples is compiled if numba is installed.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np

from megatron.data.index_cache import IndexCache, StoredArrays, find_numba
from megatron.data.samples import Piece, SampleDataset, checked_index

# Part of each cache entry's name. Increment it when the meaning of the arrays changes.
INDEX_VERSION = 1
# Each dataset is built slightly larger than its share requires, as in Megatron.
SAFETY_MARGIN = 1.005
# Number of comparisons below which the plain loop is faster than importing numba.
_WORTH_COMPILING = 200_000

Sample_co = TypeVar("Sample_co", covariant=True)


class BlendedDataset(Generic[Sample_co]):
    def __init__(self, parts: Sequence[SampleDataset[Sample_co]], index: StoredArrays) -> None:
        self.parts = parts
        self._index = index

    @classmethod
    def build(
        cls,
        parts: Sequence[SampleDataset[Sample_co]],
        weights: Sequence[float],
        num_samples: int,
        cache: IndexCache,
        name: str,
    ) -> BlendedDataset[Sample_co]:
        """Blend the datasets `parts` into `num_samples` samples, with `weights` that sum to 1."""
        assert len(parts) == len(weights)
        depends_on = {"version": INDEX_VERSION, "weights": list(weights), "samples": num_samples}

        def arrays() -> dict[str, np.ndarray]:
            dataset, sample = blend_indices(weights, num_samples)
            return {"dataset": dataset, "sample": sample}

        layout = {
            "dataset": (np.dtype(np.int16), (num_samples,)),
            "sample": (_sample_dtype(num_samples), (num_samples,)),
        }
        return cls(parts, cache.arrays(f"blend-{name}", depends_on, arrays, layout))

    def __len__(self) -> int:
        return len(self._index["dataset"])

    def __getitem__(self, index: int, /) -> Sample_co:
        dataset, sample = self._place(index)
        return dataset[sample]

    def origin(self, index: int, /) -> Sequence[Piece]:
        dataset, sample = self._place(index)
        return dataset.origin(sample)

    def _place(self, index: int) -> tuple[SampleDataset[Sample_co], int]:
        index = checked_index(index, len(self))
        part, sample = int(self._index["dataset"][index]), int(self._index["sample"][index])
        if not 0 <= part < len(self.parts) or not 0 <= sample < len(self.parts[part]):
            raise self._index.damaged(f"sample {sample} of dataset {part} does not exist")
        return self.parts[part], sample


def normalised_weights(weights: Sequence[float], flag: str) -> list[float]:
    """Return the weights scaled to a sum of 1. Raises ValueError, which names `flag`, if the list
    is empty or a weight is not a finite number above 0."""
    bad = [weight for weight in weights if not (0 < weight < math.inf)]
    if bad or not weights:
        raise ValueError(
            f"{flag}: the weight {bad[0] if bad else 'list'} is not a finite number above 0; "
            "leave out a dataset that is not wanted"
        )
    total = functools.reduce(operator.add, weights)  # sum() rounds differently since Python 3.12
    return [weight / total for weight in weights]


def part_samples(num_samples: int, weight: float) -> int:
    """Return the number of samples to build from a dataset with the share `weight` in a blend."""
    return math.ceil(num_samples * weight * SAFETY_MARGIN)


def _sample_dtype(num_samples: int) -> np.dtype:
    return np.dtype(np.uint32 if num_samples < 1 << 32 else np.int64)


def blend_indices(weights: Sequence[float], num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each sample of the blend, the index of its dataset, int16[num_samples], and its
    index in that dataset, uint32[num_samples] (int64 from 2**32 samples)."""
    shares = np.asarray(weights, np.float64)
    # Normalised again, as in Megatron: the last bit of a weight can decide a tie.
    shares = shares / shares.sum()
    dataset = np.empty(num_samples, np.int16)
    sample = np.empty(num_samples, _sample_dtype(num_samples))
    numba = find_numba() if num_samples * len(shares) >= _WORTH_COMPILING else None
    fill: Callable[..., None] = _fill if numba is None else numba.njit(_fill)
    fill(shares, np.zeros(len(shares), np.int64), dataset, sample)
    return dataset, sample


def _fill(weights: np.ndarray, taken: np.ndarray, dataset: np.ndarray, sample: np.ndarray) -> None:
    for i in range(len(dataset)):
        position = float(max(i, 1))
        best, largest = 0, weights[0] * position - float(taken[0])
        for d in range(1, len(weights)):
            missing = weights[d] * position - float(taken[d])
            if missing > largest:
                best, largest = d, missing
        dataset[i] = best
        sample[i] = taken[best]
        taken[best] += 1
