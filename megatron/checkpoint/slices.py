"""Slices: which elements of a whole parameter a process has, and which ones two slices share.

A rank's share of a parameter is the product of its ranges along each dimension. A slice is a run of
consecutive elements of the flattened share. It is divided into boxes (products of intervals) that
are boxes in both the parameter and the share. Two slices overlap where their boxes overlap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from operator import mul, sub
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.parallel.mesh import Coordinates
from megatron.parallel.shard import Ranges, Shard


@dataclass(frozen=True)
class Slice:
    """Consecutive elements, [``start``, ``end``), of a rank's flattened share of a parameter.
    ``shape`` is the shape of the whole parameter without padding. ``cuts`` has (dimension, ranges)
    for each sharded dimension, in order: along it, the share consists of these ranges,
    concatenated. Along all other dimensions, the share is complete."""

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, Ranges], ...]
    start: int
    end: int

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Slice:
        """Return the slice of all elements of a parameter."""
        return cls(shape, (), 0, math.prod(shape))

    @classmethod
    def of(cls, shard: Shard, coordinates: Coordinates, start: int, end: int) -> Slice:
        """Return elements [start, end) of a rank's flattened share, without padding at its end."""
        ranges = shard.ranges(coordinates)
        for cut in shard.cuts:
            if cut.unpadded is not None:
                assert cut.dim == 0 and len(ranges[0]) == 1, "padding is at the end of the rows"
                ((first, rows),) = ranges[0]
                rows = max(0, min(first + rows, cut.unpadded) - first)
                ranges[0] = ((first, rows),)
                end = min(end, rows * math.prod(shard.local_shape(coordinates)[1:]))
        return cls(shard.canonical_shape, tuple(sorted(ranges.items())), start, max(start, end))

    @cached_property
    def share_shape(self) -> tuple[int, ...]:
        """Shape of the complete share that contains the slice."""
        shape = list(self.shape)
        for dim, ranges in self.cuts:
            shape[dim] = sum(length for _, length in ranges)
        return tuple(shape)

    @property
    def numel(self) -> int:
        """Number of elements in the slice."""
        return self.end - self.start

    @property
    def is_whole_share(self) -> bool:
        """True if the slice is the complete share."""
        return self.start == 0 and self.end == math.prod(self.share_shape)

    def overlap(self, other: Slice) -> Overlap | None:
        """Return the elements shared with another slice of the same parameter, or None."""
        boxes = []
        for mine, their in product(self._boxes, other._boxes):
            starts = tuple(map(max, mine.starts, their.starts))
            shape = tuple(map(sub, map(min, mine.ends, their.ends), starts))
            if min(shape, default=1) > 0:
                here, there = self._place(mine, starts), other._place(their, starts)
                boxes.append(_CommonBox(shape, here, there))
        return Overlap(boxes, self._strides, other._strides) if boxes else None

    def cut(self, whole: Tensor) -> Tensor:
        """Return this slice of a whole parameter, as a flat copy."""
        flat = torch.empty(self.numel, dtype=whole.dtype)
        common = self.overlap(Slice.whole(self.shape))
        if common is not None:
            common.copy(flat, whole.contiguous().view(-1)[common.first : common.end])
        return flat

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        """Strides of the share, in elements. They apply within the slice too."""
        inner = accumulate(self.share_shape[:0:-1], mul, initial=1)
        return tuple(inner)[::-1][: len(self.shape)]

    @cached_property
    def _boxes(self) -> list[_Box]:
        ranges = {dim: _joined(of_dim) for dim, of_dim in self.cuts}
        boxes = []
        for box in _boxes(self.share_shape, self.start, self.end):
            taken = [
                _within(ranges[dim], *bounds) if dim in ranges else [(*bounds, bounds[0])]
                for dim, bounds in enumerate(box)
            ]
            for runs in product(*taken):
                starts, ends, places = zip(*runs, strict=True) if runs else ((), (), ())
                offset = sum(map(mul, places, self._strides)) - self.start
                boxes.append(_Box(starts, ends, offset))
        return boxes

    def _place(self, box: _Box, starts: tuple[int, ...]) -> int:
        return box.offset + sum(map(mul, map(sub, starts, box.starts), self._strides))


class _Box(NamedTuple):
    """Box of a parameter, [``starts``, ``ends``), that lies within a slice. ``offset`` is the index
    of its first element within the slice."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    offset: int


class _CommonBox(NamedTuple):
    """Box that two slices share: its shape, and the index of its first element in each slice."""

    shape: tuple[int, ...]
    here: int
    there: int


class Overlap:
    """The ``numel`` elements that two slices share, within [first, end) of the other slice."""

    def __init__(
        self, boxes: list[_CommonBox], here: tuple[int, ...], there: tuple[int, ...]
    ) -> None:
        self._boxes, self._here, self._there = boxes, here, there
        self.numel = sum(math.prod(box.shape) for box in boxes)
        self.first = min(box.there for box in boxes)
        self.end = 1 + max(
            box.there + sum((n - 1) * s for n, s in zip(box.shape, there, strict=True))
            for box in boxes
        )

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy the shared elements to ``target``. ``source`` is [first, end) of the other slice."""
        into, out_of = target.storage_offset(), source.storage_offset() - self.first
        for shape, here, there in self._boxes:
            target.as_strided(shape, self._here, into + here).copy_(
                source.as_strided(shape, self._there, out_of + there)
            )


def tiles(shape: tuple[int, ...], slices: Iterable[Slice]) -> bool:
    """Return whether slices cover each element of a parameter exactly once. In each share, the
    slices of data-parallel ranks must be consecutive. Along each cut dimension, the shares' ranges
    must fill it, and each combination of ranges must have a share."""
    shares: dict[tuple[Any, ...], list[Slice]] = {}
    for held in slices:
        shares.setdefault(held.cuts, []).append(held)
    cut = {tuple(dim for dim, _ in cuts) for cuts in shares}
    if len(cut) != 1:
        return False
    (dims,) = cut
    if not all(0 <= dim < len(shape) for dim in dims):
        return False
    for members in shares.values():
        runs = [(held.start, held.numel) for held in members]
        if not _fill(runs, math.prod(members[0].share_shape)):
            return False
    different = [{ranges for _, ranges in along} for along in zip(*shares, strict=True)]
    return len(shares) == math.prod(map(len, different)) and all(
        _fill([run for ranges in along for run in ranges], shape[dim])
        for dim, along in zip(dims, different, strict=True)
    )


def _fill(runs: list[tuple[int, int]], total: int) -> bool:
    """Return whether the runs (start, length) cover 0 to ``total`` without gaps or overlaps."""
    place = 0
    for start, length in sorted(runs):
        if start != place or length <= 0:
            return False
        place += length
    return place == total


def _boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield the boxes that make up elements [start, end) of a flattened array, as (start, end) for
    each dimension: end of a row, whole rows, start of a row. Partial rows are divided again."""
    if start >= end:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row
    if first > last:
        for box in _boxes(shape[1:], start - last * row, end - last * row):
            yield ((last, first), *box)
        return
    for box in _boxes(shape[1:], start - (first - 1) * row, row) if start < first * row else ():
        yield ((first - 1, first), *box)
    if first < last:
        yield ((first, last), *((0, length) for length in shape[1:]))
    for box in _boxes(shape[1:], 0, end - last * row):
        yield ((last, last + 1), *box)


def _joined(ranges: Ranges) -> Ranges:
    joined: list[tuple[int, int]] = []
    for start, length in ranges:
        if joined and sum(joined[-1]) == start:
            start, length = joined[-1][0], joined.pop()[1] + length
        joined.append((start, length))
    return tuple(joined)


def _within(ranges: Ranges, start: int, end: int) -> list[tuple[int, int, int]]:
    """Return the ranges of positions [start, end) along a share's dimension, each as (start in the
    parameter, end in the parameter, start in the share)."""
    runs, place = [], 0
    for first, length in ranges:
        low, high = max(start, place), min(end, place + length)
        if low < high:
            runs.append((first + low - place, first + high - place, low))
        place += length
    return runs
