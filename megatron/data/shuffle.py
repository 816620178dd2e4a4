"""NumPy's `RandomState.shuffle`, three times as fast for long arrays if numba is installed.

It is a Fisher-Yates shuffle from the end: for i = n - 1 ... 1 swap x[i] with x[j], where j is the
first of the generator's next 32-bit numbers, masked to the bits of i, that is at most i. NumPy
alternates drawing and swapping and waits for memory at each swap; here many j are drawn in advance,
so that a processor has several swaps in flight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

# Shorter arrays are shuffled before numba has compiled anything.
_WORTH_COMPILING = 1 << 25
_DRAWN_AT_ONCE = 1 << 16


def shuffle(rng: np.random.RandomState, array: np.ndarray) -> None:
    """Shuffle a contiguous 1-D array in place; array and generator end as after rng.shuffle."""
    worth = _WORTH_COMPILING <= len(array) <= 1 << 32  # beyond that NumPy draws 64-bit numbers
    numba = find_numba() if worth else None
    if numba is None:
        rng.shuffle(array)
        return
    draw, swap = _compiled(numba)
    generator: Any = np.random.MT19937()
    before: Any = rng.get_state(legacy=False)
    state = before
    chosen = np.empty(_DRAWN_AT_ONCE, np.uint32)
    last = len(array) - 1
    while last >= 1:
        generator.state = state
        numbers = generator.random_raw(_DRAWN_AT_ONCE)
        used, count = draw(numbers, last, chosen)
        swap(array, last, chosen[:count])
        last -= count
        if used == len(numbers):
            state = generator.state
        else:  # only the last time
            generator.state = state
            generator.random_raw(used, output=False)
            state = generator.state
    rng.set_state({**before, "state": state["state"]})


@functools.cache
def _compiled(numba: ModuleType) -> tuple[Callable[..., tuple[int, int]], Callable[..., None]]:
    return numba.njit(_draw), numba.njit(_swap)


def find_numba() -> ModuleType | None:
    """The numba package, None if it is not installed."""
    try:
        import numba
    except ImportError:
        return None
    return numba


def _draw(numbers: np.ndarray, last: int, chosen: np.ndarray) -> tuple[int, int]:
    """Fills `chosen` with the j of i = last, last - 1 ...; returns how many numbers it used, and
    how many j it drew."""
    used, count, i = 0, 0, last
    mask = np.uint64(0)
    while i >= 1 and used < len(numbers):
        while mask < np.uint64(i):
            mask = (mask << np.uint64(1)) | np.uint64(1)
        while np.uint64(i) <= (mask >> np.uint64(1)):
            mask >>= np.uint64(1)
        j = numbers[used] & mask
        used += 1
        if j <= np.uint64(i):
            chosen[count] = j
            count += 1
            i -= 1
    return used, count


def _swap(array: np.ndarray, last: int, chosen: np.ndarray) -> None:
    i = last
    for j in chosen:
        kept = array[i]
        array[i] = array[j]
        array[j] = kept
        i -= 1
