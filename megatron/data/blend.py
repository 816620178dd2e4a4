"""Weighted blends of datasets: the sample goes where the share is furthest behind.

Sample i goes to the dataset d with the largest weight_d * max(i, 1) - taken_d, the first one on a
tie, as in Megatron. The rule is sequential by definition: a loop, compiled where numba is there.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence

import numpy as np

from megatron.data.shuffle import find_numba

# A part is built slightly larger than its share, as in Megatron.
SAFETY_MARGIN = 1.005
# Below this many comparisons the plain loop is done before numba is even imported.
_WORTH_COMPILING = 200_000


def normalised_weights(weights: Sequence[float], flag: str) -> list[float]:
    """Weights that sum to 1.

    Raises:
        ValueError: one is not a finite number above 0; `flag` is where they were given.
    """
    bad = [weight for weight in weights if not (0 < weight < math.inf)]
    if bad or not weights:
        raise ValueError(
            f"{flag}: the weight {bad[0] if bad else 'list'} is not a finite number above 0; "
            "leave out a dataset that is not wanted"
        )
    total = functools.reduce(operator.add, weights)  # sum() rounds differently from Python 3.12 on
    return [weight / total for weight in weights]


def part_samples(num_samples: int, weight: float) -> int:
    """Samples to build for the part that has the share `weight` of `num_samples`."""
    return math.ceil(num_samples * weight * SAFETY_MARGIN)


def sample_dtype(num_samples: int) -> np.dtype:
    """Of the sample numbers of a blend."""
    return np.dtype(np.uint32 if num_samples < 1 << 32 else np.int64)


def blend_indices(weights: Sequence[float], num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Which dataset, and which of its samples, each sample of the blend is.

    Args:
        weights: share of each dataset, summing to 1.

    Returns:
        dataset numbers, int16[num_samples], and sample numbers, uint32 (int64 from 2**32 samples).
    """
    shares = np.asarray(weights, np.float64)
    # Once more, as Megatron does: the last bit of a weight can decide a tie.
    shares = shares / shares.sum()
    dataset = np.empty(num_samples, np.int16)
    sample = np.empty(num_samples, sample_dtype(num_samples))
    worth = num_samples * len(shares) >= _WORTH_COMPILING
    numba = find_numba() if worth else None
    fill: Callable[..., None] = _fill if numba is None else numba.njit(_fill)
    fill(shares, np.zeros(len(shares), np.int64), dataset, sample)
    return dataset, sample


def _fill(weights: np.ndarray, taken: np.ndarray, dataset: np.ndarray, sample: np.ndarray) -> None:
    for i in range(len(dataset)):
        position = float(max(i, 1))
        best, largest = 0, weights[0] * position - float(taken[0])
        for d in range(1, len(weights)):
            behind = weights[d] * position - float(taken[d])
            if behind > largest:
                best, largest = d, behind
        dataset[i] = best
        sample[i] = taken[best]
        taken[best] += 1
