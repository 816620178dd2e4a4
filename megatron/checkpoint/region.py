"""Which elements of a whole parameter somebody holds, and how two such regions overlap.

A share of a parameter is a product: of each dimension some ranges. A region is a run of elements of
the flattened share. It comes apart into blocks, each a box both in the parameter and in the share;
two regions overlap where their blocks do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from operator import mul, sub
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.parallel.mesh import Coordinates
from megatron.parallel.shard import Ranges, Shard


class Block(NamedTuple):
    """A box of a parameter that a region has.

    Attributes:
        starts: first place along each dimension.
        ends: place after the last one.
        offset: place of its first element in the region.
    """

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    offset: int


class Overlap(NamedTuple):
    """A box that two regions have in common.

    Attributes:
        shape: its lengths along each dimension.
        here, there: place of its first element in one and in the other region.
        strides_here, strides_there: distance of neighbours along each dimension in one and in the
            other.
    """

    shape: tuple[int, ...]
    here: int
    there: int
    strides_here: tuple[int, ...]
    strides_there: tuple[int, ...]

    def end_there(self) -> int:
        """Place after its last element in the other region."""
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides_there, strict=True))
        return self.there + last + 1

    def copy(self, target: Tensor, source: Tensor, first: int = 0) -> None:
        """Copies it between the two regions' flat elements.

        Args:
            target: all elements of the one region.
            source: elements of the other, from number ``first`` on.
        """
        here, there = target.storage_offset() + self.here, source.storage_offset() + self.there
        target.as_strided(self.shape, self.strides_here, here).copy_(
            source.as_strided(self.shape, self.strides_there, there - first)
        )


@dataclass(frozen=True)
class Region:
    """A flat run of elements of a rank's share of a parameter.

    Attributes:
        shape: shape of the whole parameter, without padding.
        cuts: (dimension, ranges) of each dimension that is cut, in the order of the dimensions;
            the share has these ranges, one after the other, and all of the other dimensions.
        start: first element of the flattened share that is held.
        end: element after the last one.
    """

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, Ranges], ...]
    start: int
    end: int

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Region:
        """All of a parameter."""
        return cls(shape, (), 0, math.prod(shape))

    @cached_property
    def share_shape(self) -> tuple[int, ...]:
        """Shape of the share."""
        shape = list(self.shape)
        for dim, ranges in self.cuts:
            shape[dim] = sum(length for _, length in ranges)
        return tuple(shape)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Distance of neighbours along each dimension, in the share and in the region."""
        inner = accumulate(self.share_shape[:0:-1], mul, initial=1)
        return tuple(inner)[::-1][: len(self.shape)]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.end - self.start

    @property
    def is_whole_share(self) -> bool:
        """Whether it is all of its share."""
        return self.start == 0 and self.end == math.prod(self.share_shape)

    @cached_property
    def blocks(self) -> list[Block]:
        """The region as boxes of the parameter."""
        ranges = {dim: _joined(of_dim) for dim, of_dim in self.cuts}
        found = []
        for box in _boxes(self.share_shape, self.start, self.end):
            taken = [
                _within(ranges[dim], *bounds) if dim in ranges else [(*bounds, bounds[0])]
                for dim, bounds in enumerate(box)
            ]
            for pieces in product(*taken):
                starts, ends, places = zip(*pieces, strict=True) if pieces else ((), (), ())
                offset = sum(map(mul, places, self.strides)) - self.start
                found.append(Block(starts, ends, offset))
        return found

    def overlaps(self, other: Region) -> Iterator[Overlap]:
        """The boxes that this region has in common with another of the same parameter."""
        strides_here, strides_there = self.strides, other.strides
        for mine, their in product(self.blocks, other.blocks):
            starts = tuple(map(max, mine.starts, their.starts))
            shape = tuple(map(sub, map(min, mine.ends, their.ends), starts))
            if min(shape, default=1) > 0:
                here = _place(mine, starts, strides_here)
                there = _place(their, starts, strides_there)
                yield Overlap(shape, here, there, strides_here, strides_there)

    def cut(self, whole: Tensor) -> Tensor:
        """The region's elements, flat, of a whole parameter."""
        flat = torch.empty(self.numel, dtype=whole.dtype)
        for overlap in self.overlaps(Region.whole(self.shape)):
            overlap.copy(flat, whole.contiguous().view(-1))
        return flat


def _place(block: Block, starts: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Place in the region of an element of a block."""
    return block.offset + sum(map(mul, map(sub, starts, block.starts), strides))


def _boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Elements [start, end) of a flattened array as boxes, (start, end) along each dimension: the
    rest of a row, whole rows, and the beginning of a row, where the parts of rows come apart in the
    same way."""
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
    """The same ranges, those that continue another one as a part of it."""
    found: list[tuple[int, int]] = []
    for start, length in ranges:
        if found and sum(found[-1]) == start:
            start, length = found[-1][0], found.pop()[1] + length
        found.append((start, length))
    return tuple(found)


def _within(ranges: Ranges, start: int, end: int) -> list[tuple[int, int, int]]:
    """What lies at places [start, end) of a share's dimension: (start in the whole, end in the
    whole, place in the share) of each run."""
    found, place = [], 0
    for first, length in ranges:
        low, high = max(start, place), min(end, place + length)
        if low < high:
            found.append((first + low - place, first + high - place, low))
        place += length
    return found


def region_of(shard: Shard, coordinates: Coordinates, start: int, end: int) -> Region | None:
    """Elements [start, end) of a rank's share, less the padding.

    Args:
        shard: how the parameter is cut.
        coordinates: the rank's place in the mesh.
        start: first element in the flattened share, which includes padding.
        end: element after the last one.

    Returns:
        None when nothing but padding is left.
    """
    ranges = shard.ranges(coordinates)
    for cut in shard.cuts:
        if cut.unpadded is not None:
            assert cut.dim == 0 and len(ranges[0]) == 1, "padding is at the end of the rows"
            ((first, rows),) = ranges[0]
            rows = max(0, min(first + rows, cut.unpadded) - first)
            ranges[0] = ((first, rows),)
            end = min(end, rows * math.prod(shard.local_shape(coordinates)[1:]))
    if start >= end:
        return None
    return Region(shard.canonical_shape, tuple(sorted(ranges.items())), start, end)
