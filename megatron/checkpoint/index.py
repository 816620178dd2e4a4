"""Which part of which parameter a file holds.

A parameter is stored in pieces. A piece says which rows (or columns) of the whole parameter the
share of its tensor-parallel rank consists of, and which elements of that share, flattened, it
holds; the data-parallel ranks of ZeRO hold consecutive elements of one share.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from megatron.parallel.shard import Shard


@dataclass(frozen=True)
class Piece:
    """Part of one parameter.

    Attributes:
        shape: shape of the whole parameter, without padding.
        dim: the dimension that is cut; None when the share is the whole parameter.
        ranges: (start, length) along ``dim``; the share is these, one behind the other.
        start: first element of the flattened share that is held.
        end: element after the last one.
        files: file that holds the elements of ``weight`` and of each moment.
        part: tells apart the pieces of one parameter that one process holds several of; it is a
            part of their keys in the files.
    """

    shape: tuple[int, ...]
    dim: int | None
    ranges: tuple[tuple[int, int], ...]
    start: int
    end: int
    files: dict[str, str]
    part: str = ""

    @property
    def share_shape(self) -> tuple[int, ...]:
        """Shape of the share."""
        if self.dim is None:
            return self.shape
        width = sum(length for _, length in self.ranges)
        return (*self.shape[: self.dim], width, *self.shape[self.dim + 1 :])

    @property
    def is_whole_share(self) -> bool:
        """Whether the piece is all of its share."""
        return self.start == 0 and self.end == math.prod(self.share_shape)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Piece:
        """The inverse of :meth:`to_json`."""
        return cls(
            shape=tuple(content["shape"]),
            dim=content["dim"],
            ranges=tuple((start, length) for start, length in content["ranges"]),
            start=content["start"],
            end=content["end"],
            files=dict(content["files"]),
            part=content.get("part", ""),
        )


def piece_of(
    shard: Shard, rank: int, size: int, start: int, end: int, files: dict[str, str]
) -> Piece | None:
    """The piece for elements [start, end) of a rank's share, less the padding.

    Args:
        shard: how the parameter is cut.
        rank: tensor-parallel rank.
        size: tensor-parallel size.
        start: first element in the flattened share, which includes padding.
        end: element after the last one.
        files: see :class:`Piece`.

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
    part = "" if shard.held is None else "parts" + "-".join(map(str, shard.held))
    return Piece(shard.canonical_shape, shard.dim, tuple(ranges), start, end, files, part)
