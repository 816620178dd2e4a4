"""Which elements of a whole parameter somebody holds, and how two such regions overlap."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.parallel.shard import Shard


class Block(NamedTuple):
    """A rectangle of a parameter, seen as a matrix, and where a flat region keeps it.

    Attributes:
        top, bottom: its rows.
        left, right: its columns.
        offset: place of its first element in the region.
        stride: distance of its rows in the region.
    """

    top: int
    bottom: int
    left: int
    right: int
    offset: int
    stride: int

    def at(self, row: int, column: int) -> int:
        """Place of an element in the region."""
        return self.offset + (row - self.top) * self.stride + column - self.left


class Overlap(NamedTuple):
    """A rectangle that two regions have in common.

    Attributes:
        shape: its rows and columns.
        here, there: place of its first element in one and in the other region.
        stride_here, stride_there: distance of its rows in one and in the other.
    """

    shape: tuple[int, int]
    here: int
    there: int
    stride_here: int
    stride_there: int

    def end_there(self) -> int:
        """Place after its last element in the other region."""
        rows, columns = self.shape
        return self.there + (rows - 1) * self.stride_there + columns

    def copy(self, target: Tensor, source: Tensor, first: int = 0) -> None:
        """Copies it between the two regions' flat elements.

        Args:
            target: all elements of the one region.
            source: elements of the other, from number ``first`` on.
        """
        here = target.as_strided(
            self.shape, (self.stride_here, 1), target.storage_offset() + self.here
        )
        there = source.as_strided(
            self.shape, (self.stride_there, 1), source.storage_offset() + self.there - first
        )
        here.copy_(there)


@dataclass(frozen=True)
class Region:
    """A flat run of elements of a tensor-parallel rank's share of a parameter.

    Attributes:
        shape: shape of the whole parameter, without padding.
        dim: the dimension that is cut; None when the share is the whole parameter.
        ranges: (start, length) along ``dim``; the share is these, one behind the other.
        start: first element of the flattened share that is held.
        end: element after the last one.
    """

    shape: tuple[int, ...]
    dim: int | None
    ranges: tuple[tuple[int, int], ...]
    start: int
    end: int

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Region:
        """All of a parameter."""
        return cls(shape, None, (), 0, math.prod(shape))

    @property
    def share_shape(self) -> tuple[int, ...]:
        """Shape of the share."""
        if self.dim is None:
            return self.shape
        width = sum(length for _, length in self.ranges)
        return (*self.shape[: self.dim], width, *self.shape[self.dim + 1 :])

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.end - self.start

    @property
    def is_whole_share(self) -> bool:
        """Whether it is all of its share."""
        return self.start == 0 and self.end == math.prod(self.share_shape)

    def blocks(self) -> Iterator[Block]:
        """The region as rectangles of the parameter seen as a matrix: rows before the cut
        dimension's end, columns behind it. A run of elements is at most three per range: the rest
        of a row, whole rows, and the beginning of a row."""
        inner = math.prod(self.shape[1:])
        if self.dim is None:
            yield from _cut_rows(0, self.shape[0], 0, inner, 0, inner, self.start, self.end)
        elif self.dim == 0:
            place = 0
            for start, length in self.ranges:
                yield from _cut_rows(
                    start, start + length, 0, inner, place, inner, self.start, self.end
                )
                place += length * inner
        else:
            assert self.dim == 1, "parameters are cut by rows or by columns"
            behind = math.prod(self.shape[2:])
            stride = sum(length for _, length in self.ranges) * behind
            place = 0
            for start, length in self.ranges:
                left, right = start * behind, (start + length) * behind
                yield from _cut_rows(
                    0, self.shape[0], left, right, place, stride, self.start, self.end
                )
                place += length * behind

    def overlaps(self, other: Region) -> Iterator[Overlap]:
        """The rectangles that this region has in common with another of the same parameter."""
        theirs = list(other.blocks())
        for mine in self.blocks():
            for their in theirs:
                top, bottom = max(mine.top, their.top), min(mine.bottom, their.bottom)
                left, right = max(mine.left, their.left), min(mine.right, their.right)
                if top < bottom and left < right:
                    yield Overlap(
                        (bottom - top, right - left),
                        mine.at(top, left),
                        their.at(top, left),
                        mine.stride,
                        their.stride,
                    )

    def cut(self, whole: Tensor) -> Tensor:
        """The region's elements, flat, of a whole parameter."""
        flat = torch.empty(self.numel, dtype=whole.dtype)
        for overlap in self.overlaps(Region.whole(self.shape)):
            overlap.copy(flat, whole.contiguous().view(-1))
        return flat


def _cut_rows(
    top: int, bottom: int, left: int, right: int, place: int, stride: int, start: int, end: int
) -> Iterator[Block]:
    """What a run of elements [start, end) has of a rectangle that lies at ``place`` of the share,
    its rows ``stride`` apart; places in the result count from ``start``."""
    width = right - left
    if not width:
        return

    def piece(first: int, last: int, begin: int, stop: int) -> Iterator[Block]:
        if first < last and begin < stop:
            offset = place + (first - top) * stride + begin - start
            yield Block(first, last, left + begin, left + stop, offset, stride)

    def divide(position: int) -> tuple[int, int]:
        """The row that a position of the share falls in, and the columns of it before that."""
        row, column = divmod(position - place, stride)
        return top + row, min(max(column, 0), width)

    first, begin = divide(max(start, place))
    last, stop = divide(end) if end > place else (top, 0)
    if last >= bottom:
        last, stop = bottom, 0
    if first >= bottom:
        return
    if first == last:
        yield from piece(first, first + 1, begin, stop)
        return
    if begin:
        yield from piece(first, first + 1, begin, width)
        first += 1
    yield from piece(first, last, 0, width)
    yield from piece(last, last + 1, 0, stop)


def region_of(shard: Shard, rank: int, size: int, start: int, end: int) -> Region | None:
    """Elements [start, end) of a rank's share, less the padding.

    Args:
        shard: how the parameter is cut.
        rank: tensor-parallel rank.
        size: tensor-parallel size.
        start: first element in the flattened share, which includes padding.
        end: element after the last one.

    Returns:
        None when nothing but padding is left.
    """
    ranges = shard.ranges(rank, size)
    if shard.unpadded is not None:
        assert shard.dim == 0 and len(ranges) == 1, "padding is at the end of the rows"
        first, rows = ranges[0]
        rows = max(0, min(first + rows, shard.unpadded) - first)
        ranges = [(first, rows)]
        end = min(end, rows * math.prod(shard.full_shape[1:]))
    if start >= end:
        return None
    return Region(shard.canonical_shape, shard.dim, tuple(ranges), start, end)
