"""A checkpoint's two descriptive files: the index (which file contains which slice of which
parameter) and the manifest (size and SHA-256 of every file, and of itself)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from megatron.checkpoint.files import (
    CheckpointError,
    Facts,
    json_of,
    json_text,
    read_bytes,
    read_json,
    write_bytes,
)
from megatron.checkpoint.slices import Slice, tiles
from megatron.util.digests import sha256, sha256_of_file
from megatron.util.progress import progress_bar

INDEX, MANIFEST, CONFIG, STATE = "index.json", "manifest.json", "config.json", "state.json"
BASE = "base.json"
"""File that describes the base model of adapters. Only checkpoints of adapters have it."""
MORE_STATES = "states"
"""Name prefix of files with optimizer states whose shapes differ from their parameters'."""
KEPT_COUNTS = "kept"
"""Key of the state: update counts of values kept next to the moments, such as weight averages."""
_FORMAT = 2
_BLANK = "0" * 64
"""Placeholder for the manifest's own SHA-256 while the digest is computed."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_REQUIRED = (CONFIG, INDEX, STATE)
_MOST_COUNTED = 2**63
_COUNTERS = ("iteration", "consumed_samples", "optimizer_step")


def tensor_key(name: str, kind: str, part: str = "") -> str:
    """Return a tensor's key in a safetensors file. ``kind`` is ``weight`` or a moment's name."""
    words = (name, part, "" if kind == "weight" else kind)
    return ".".join(word for word in words if word)


@dataclass(frozen=True)
class IndexEntry:
    """Location of one slice of a parameter. ``files`` maps ``weight`` and each moment to a file
    name. ``part`` distinguishes the keys of a parameter's slices in the same file."""

    slice: Slice
    files: dict[str, str]
    part: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON values. Two or more cuts are stored as ``cuts``, one as ``dim``
        and ``ranges``, and none as a null ``dim``."""
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
        """Return the entry that :meth:`to_json` converted. Raises ValueError if it is invalid."""
        several = "cuts" in content
        entries = content["cuts"] if several else [(content["dim"], content["ranges"])]
        cuts = [
            (dim, tuple((start, length) for start, length in ranges)) for dim, ranges in entries
        ]
        held = Slice(
            shape=tuple(content["shape"]),
            cuts=tuple(cut for cut in cuts if cut[0] is not None),
            start=content["start"],
            end=content["end"],
        )
        numbers = (
            *held.shape,
            held.start,
            held.end,
            *(n for _, runs in held.cuts for n in sum(runs, ())),
        )
        if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
            raise ValueError("sizes and places must be whole numbers below 2^63")
        return cls(held, dict(content["files"]), content.get("part", ""))


def read_index(folder: Path, files: Mapping[str, Any]) -> dict[str, list[IndexEntry]]:
    """Read and check a checkpoint's index. Return each parameter's slices by canonical name. Raises
    CheckpointError if slices overlap, leave a gap, disagree about shape or kinds, or are in a file
    that the manifest's entries ``files`` do not list."""
    path = folder / INDEX
    content = read_json(path)
    try:
        index = {
            name: [IndexEntry.from_json(entry) for entry in entries]
            for name, entries in content.items()
        }
        for name, entries in index.items():
            _check_parameter(path, name, entries, files)
    except CheckpointError:
        raise
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path} is not an index: {error!r:.200}") from None
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
        if not isinstance(entry.part, str):
            raise CheckpointError(f"{path}: a part of {name} is {entry.part!r:.60}, not a name")
        for file in entry.files.values():
            if file not in files:
                raise CheckpointError(
                    f"{path}: {name} is in {file}, which the manifest does not list"
                )
    if not tiles(shape, (entry.slice for entry in entries)):
        raise CheckpointError(
            f"{path}: the slices of {name} overlap or leave a gap in its {math.prod(shape)} "
            "elements"
        )


def file_facts(path: Path) -> Facts:
    """Return a file's manifest entry. This reads the whole file."""
    return {"bytes": path.stat().st_size, "sha256": sha256_of_file(path)}


def write_manifest(folder: Path, facts: dict[str, Facts]) -> None:
    """Write a manifest with the given entries, by file name, and flush it to the disk."""
    content = {"format": _FORMAT, "files": dict(sorted(facts.items())), "sha256": _BLANK}
    text = json_text(content)
    write_bytes(folder / MANIFEST, text.replace(_BLANK, sha256(text)).encode())


def manifest(folder: Path) -> dict[str, Facts]:
    """Return the manifest entries of a checkpoint by file name. Raises CheckpointError if the
    manifest is missing or damaged."""
    path = folder / MANIFEST
    raw = read_bytes(path)
    content = json_of(path, raw)
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is not a manifest of format {_FORMAT}")
    own, files, text = str(content.get("sha256")), content.get("files"), raw.decode()
    if not _SHA256.fullmatch(own) or sha256(text.replace(own, _BLANK)) != own:
        raise CheckpointError(f"{path} is damaged: its SHA-256 differs from the one in it")
    checked = entries_of(path, files)
    for name in _REQUIRED:
        if name not in checked:
            raise CheckpointError(f"{path} does not list {name}, which every checkpoint has")
    return checked


def entries_of(path: Path, files: object) -> dict[str, Facts]:
    """Return a manifest's ``files`` after checking them. Raises CheckpointError if an entry is
    malformed, or refers to a file outside the manifest's folder."""
    if not isinstance(files, dict) or not all(map(_is_entry, files.items())):
        raise CheckpointError(f"{path}: its entries are not files with bytes and sha256")
    return files


def _is_entry(item: tuple[str, object]) -> bool:
    name, facts = item
    path = PurePosixPath(name)
    return (
        not path.is_absolute()
        and ".." not in path.parts
        and isinstance(facts, dict)
        and isinstance(facts.get("bytes"), int)
        and isinstance(facts.get("sha256"), str)
    )


def verify(folder: Path, share: int = 0, shares: int = 1) -> None:
    """Compare a checkpoint's files with its manifest. Ranks can divide the work: each checks every
    ``shares``-th file, starting with ``share``. Share 0 also checks the index and the counters.
    Raises CheckpointError if a file is missing, differs in size or checksum, or is not listed, if
    the index's slices do not tile each parameter, or if a counter is invalid."""
    files = manifest(folder)
    mine = list(files.items())[share::shares]
    with progress_bar(f"verifying {folder}", total=sum(facts["bytes"] for _, facts in mine)) as bar:
        for name, facts in mine:
            check_file(folder / name, facts, bar.update)
    if share == 0:
        read_index(folder, files)
        _check_counters(folder / STATE)
        _check_listed(folder, files)


def _check_listed(folder: Path, files: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a folder contains unlisted files or symbolic links. Hidden files are
    ignored: file systems and editors create them, and they are never read."""
    known = {MANIFEST, *files}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if any(part.startswith(".") for part in name.parts) or name.as_posix() in known:
            continue
        if path.is_symlink() or not path.is_dir():
            raise CheckpointError(
                f"{path} is not part of the checkpoint: {folder / MANIFEST} does not list it; move "
                "it away"
            )


def check_file(
    path: Path, facts: Facts, read: Callable[[int], object] = lambda count: None
) -> None:
    """Compare a file with its manifest entry. Raises CheckpointError if missing or different."""
    try:
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            raise CheckpointError(f"{path} is missing")
        if size != facts["bytes"]:
            raise CheckpointError(
                f"{path} has {size} bytes, but the manifest says {facts['bytes']}"
            )
        digest = sha256_of_file(path, read)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if digest != facts["sha256"]:
        raise CheckpointError(f"{path} is damaged: its SHA-256 differs from the manifest's")


def _check_counters(path: Path) -> None:
    """Raise CheckpointError if a counter is not a valid number. In a training run's checkpoint,
    which has a world size, a missing counter is an error too."""
    state = read_json(path)
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    for name in _COUNTERS:
        value = state.get(name)
        counts = type(value) is int and 0 <= value < _MOST_COUNTED
        if (name in state or "world_size" in state) and not counts:
            raise CheckpointError(
                f"{path}: {name} is {value!r:.40}; expected a non-negative integer below 2^63"
            )
