"""Which part of which parameter a file holds.

A parameter is stored in pieces, each a :class:`~megatron.checkpoint.region.Region`: the
data-parallel ranks of ZeRO hold consecutive elements of one share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.checkpoint.region import Region, region_of
from megatron.parallel.mesh import Coordinates
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

    @classmethod
    def of(cls, region: Region, files: dict[str, str], part: str = "") -> Piece:
        """The piece that is this region."""
        return cls(region.shape, region.cuts, region.start, region.end, files, part)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values: ``cuts`` of a parameter that is cut along several dimensions; for
        one that is cut along one ``dim`` and ``ranges``, for one that is not null and none."""
        cuts: dict[str, Any] = {"cuts": self.cuts}
        if len(self.cuts) < 2:
            dim, ranges = self.cuts[0] if self.cuts else (None, ())
            cuts = {"dim": dim, "ranges": ranges}
        return {
            "shape": self.shape,
            **cuts,
            "start": self.start,
            "end": self.end,
            "files": self.files,
            "part": self.part,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Piece:
        """The inverse of :meth:`to_json`."""
        several = "cuts" in content
        found = content["cuts"] if several else [(content["dim"], content["ranges"])]
        cuts = [(dim, tuple((start, length) for start, length in ranges)) for dim, ranges in found]
        return cls(
            shape=tuple(content["shape"]),
            cuts=tuple(cut for cut in cuts if cut[0] is not None),
            start=content["start"],
            end=content["end"],
            files=dict(content["files"]),
            part=content.get("part", ""),
        )


def piece_of(
    shard: Shard, coordinates: Coordinates, start: int, end: int, files: dict[str, str]
) -> Piece | None:
    """The piece for elements [start, end) of a rank's share, less the padding.

    Args:
        shard: how the parameter is cut.
        coordinates: the rank's place in the mesh.
        start: first element in the flattened share, which includes padding.
        end: element after the last one.
        files: see :class:`Piece`.

    Returns:
        None when nothing but padding is left.
    """
    region = region_of(shard, coordinates, start, end)
    if region is None:
        return None
    return Piece.of(region, files, shard.part)
