"""Examples put together in samples, without cutting any: best fit, in the order they come."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Packed(NamedTuple):
    """What each sample holds."""

    examples: npt.NDArray[np.int64]
    """Example numbers, sample after sample."""
    bounds: npt.NDArray[np.int64]
    """Sample i holds examples[bounds[i]] up to examples[bounds[i + 1]]."""


def best_fit(
    lengths: npt.NDArray[np.integer], order: npt.NDArray[np.int64], capacity: int
) -> Packed:
    """Puts each example into the fullest sample that has room for it, else into a new one.

    Best fit needs at most 1.7 times the fewest samples possible (Johnson et al. 1974); on lengths
    of instruction data it is within a few percent. In a random order, unlike one by length,
    samples are random mixtures and no epoch repeats those of another.

    Args:
        lengths: tokens of every example, none above `capacity`.
        order: numbers of the examples to pack, in the order in which they come.
        capacity: tokens that fit into a sample.
    """
    open_samples: list[list[int]] = [[] for _ in range(capacity + 1)]  # by the room they have
    rooms = 0  # bit r is set where a sample has room for r tokens: shifts find the next in C
    sample_of = np.empty(len(order), np.int64)
    samples = 0
    for place, length in enumerate(lengths[order].tolist()):
        assert length <= capacity
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            sample = open_samples[room].pop()
            if not open_samples[room]:
                rooms ^= 1 << room
        else:
            room, sample = capacity, samples
            samples += 1
        sample_of[place] = sample
        room -= length
        if room:
            open_samples[room].append(sample)
            rooms |= 1 << room
    by_sample = np.argsort(sample_of, kind="stable")
    bounds = np.zeros(samples + 1, np.int64)
    np.cumsum(np.bincount(sample_of, minlength=samples), out=bounds[1:])
    return Packed(order[by_sample], bounds)


def one_each(order: npt.NDArray[np.int64]) -> Packed:
    """A sample for every example."""
    return Packed(order, np.arange(len(order) + 1, dtype=np.int64))


def shuffled(packed: Packed, rng: np.random.Generator) -> Packed:
    """The same samples in a random order."""
    sizes = np.diff(packed.bounds)
    samples = rng.permutation(len(sizes))
    bounds = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes[samples], out=bounds[1:])
    # Number within its sample, of every example in the new order, plus where that sample began.
    within = np.arange(bounds[-1]) - np.repeat(bounds[:-1], sizes[samples])
    return Packed(
        packed.examples[within + np.repeat(packed.bounds[:-1][samples], sizes[samples])], bounds
    )
