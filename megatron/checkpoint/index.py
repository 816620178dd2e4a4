"""Which part of which parameter a file holds.

A parameter is stored in pieces, each a :class:`~megatron.checkpoint.region.Region`: the
data-parallel ranks of ZeRO hold consecutive elements of one tensor-parallel rank's share.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from megatron.checkpoint.region import Region, region_of
from megatron.parallel.shard import Shard


@dataclass(frozen=True)
class Piece(Region):
    """Part of one parameter.

    Attributes:
        files: file that holds the elements of ``weight`` and of each moment.
        part: tells apart the pieces of one parameter that one process holds several of; it is a
            part of their keys in the files.
    """

    files: dict[str, str]
    part: str = ""

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
    region = region_of(shard, rank, size, start, end)
    if region is None:
        return None
    part = "" if shard.held is None else "parts" + "-".join(map(str, shard.held))
    return Piece(**vars(region), files=files, part=part)
