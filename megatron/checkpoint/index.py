"""The index of a checkpoint: the slices of every parameter, and the files that hold them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import CheckpointError, read_json
from megatron.checkpoint.slices import Slice, tiles

INDEX = "index.json"


def tensor_key(name: str, kind: str, part: str = "") -> str:
    """Key of a parameter's weights or of one of its moments in a safetensors file.

    Args:
        name: canonical name of the parameter.
        kind: ``weight`` or the name of a moment.
        part: see :class:`IndexEntry`.
    """
    words = (name, part, "" if kind == "weight" else kind)
    return ".".join(word for word in words if word)


@dataclass(frozen=True)
class IndexEntry:
    """Where a slice of a parameter is stored.

    Attributes:
        slice: the slice.
        files: file that holds the elements of ``weight`` and of each moment.
        part: tells apart the slices of one parameter that one process holds several of; it is a
            part of their keys in the files.
    """

    slice: Slice
    files: dict[str, str]
    part: str = ""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values: ``cuts`` of a parameter that is cut along several dimensions; for
        one that is cut along one ``dim`` and ``ranges``, for one that is not null and none."""
        held = self.slice
        cuts: dict[str, Any] = {"cuts": held.cuts}
        if len(held.cuts) < 2:
            dim, ranges = held.cuts[0] if held.cuts else (None, ())
            cuts = {"dim": dim, "ranges": ranges}
        return {
            "shape": held.shape,
            **cuts,
            "start": held.start,
            "end": held.end,
            "files": self.files,
            "part": self.part,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> IndexEntry:
        """The inverse of :meth:`to_json`."""
        several = "cuts" in content
        found = content["cuts"] if several else [(content["dim"], content["ranges"])]
        cuts = [(dim, tuple((start, length) for start, length in ranges)) for dim, ranges in found]
        held = Slice(
            shape=tuple(content["shape"]),
            cuts=tuple(cut for cut in cuts if cut[0] is not None),
            start=content["start"],
            end=content["end"],
        )
        return cls(held, dict(content["files"]), content.get("part", ""))


def read_index(folder: Path, files: Mapping[str, Any]) -> dict[str, list[IndexEntry]]:
    """Reads a checkpoint's index and checks it.

    Args:
        folder: the checkpoint.
        files: what its manifest lists.

    Returns:
        The slices of each parameter by canonical name.

    Raises:
        CheckpointError: slices overlap, leave a gap, disagree about shape or kinds, or lie in files
            that the manifest does not list.
    """
    path = folder / INDEX
    try:
        index = {
            name: [IndexEntry.from_json(entry) for entry in entries]
            for name, entries in read_json(path).items()
        }
        for name, entries in index.items():
            _check_parameter(path, name, entries, files)
    except (KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path} is not an index: {error!r}") from None
    if not index:
        raise CheckpointError(f"{path} lists no parameter")
    return index


def _check_parameter(
    path: Path, name: str, entries: list[IndexEntry], files: Mapping[str, Any]
) -> None:
    if not entries:
        raise CheckpointError(f"{path} has no slice of {name}")
    shape, kinds = entries[0].slice.shape, entries[0].files.keys()
    for entry in entries:
        if entry.slice.shape != shape or entry.files.keys() != kinds or "weight" not in kinds:
            raise CheckpointError(f"{path}: the slices of {name} differ in shape or kinds")
        for file in entry.files.values():
            if file not in files:
                raise CheckpointError(
                    f"{path}: {name} lies in {file}, which the manifest does not list"
                )
    if not tiles(shape, (entry.slice for entry in entries)):
        raise CheckpointError(
            f"{path}: the slices of {name} overlap or leave a gap in its {math.prod(shape)} "
            "elements"
        )
