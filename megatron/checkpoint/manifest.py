"""The manifest of a checkpoint: size and SHA-256 of every file, and of the manifest itself. By it
and by what the JSON files say a checkpoint is verified."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from megatron.checkpoint.files import (
    CheckpointError,
    Facts,
    json_text,
    parse_json,
    read_bytes,
    read_json,
    write_bytes,
)
from megatron.checkpoint.index import INDEX, read_index
from megatron.util.digests import sha256, sha256_of_file
from megatron.util.progress import progress_bar

MANIFEST, CONFIG, STATE = "manifest.json", "config.json", "state.json"
_FORMAT = 2
_BLANK = "0" * 64
"""Stands in place of the manifest's own SHA-256 while that is computed."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_REQUIRED = (CONFIG, INDEX, STATE)
_COUNTERS = ("iteration", "consumed_samples", "optimizer_step")


def file_facts(path: Path) -> Facts:
    """What the manifest says of a file."""
    return {"bytes": path.stat().st_size, "sha256": sha256_of_file(path)}


def write_manifest(folder: Path, facts: dict[str, Facts]) -> None:
    """Writes a checkpoint's manifest, to the disk.

    Args:
        folder: the checkpoint, which has none yet.
        facts: entry of every file, by its path in the folder.
    """
    content = {"format": _FORMAT, "files": dict(sorted(facts.items())), "sha256": _BLANK}
    text = json_text(content)
    write_bytes(folder / MANIFEST, text.replace(_BLANK, sha256(text)).encode())


def manifest(folder: Path) -> dict[str, Facts]:
    """Manifest entries of a checkpoint by file name.

    Raises:
        CheckpointError: there is no manifest, or it is damaged.
    """
    path = folder / MANIFEST
    raw = read_bytes(path)
    content = parse_json(path, raw)
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is not a manifest of format {_FORMAT}")
    own, files = content.get("sha256"), content.get("files")
    text = raw.decode()
    if (
        not isinstance(own, str)
        or not _SHA256.fullmatch(own)
        or sha256(text.replace(own, _BLANK)) != own
    ):
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one that it names")
    if not isinstance(files, dict) or not all(map(_is_entry, files.items())):
        raise CheckpointError(f"{path}: its entries are not files with bytes and sha256")
    for name in _REQUIRED:
        if name not in files:
            raise CheckpointError(f"{path} does not list {name}, which every checkpoint has")
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
    """Compares files with the manifest, and the index with it.

    Args:
        folder: a checkpoint.
        share: check every ``shares``-th file only, from this one on, so that ranks can divide them;
            the first share also checks the index and the counters.
        shares: number of ranks that divide the files.

    Raises:
        CheckpointError: a file is missing, too short or long, or its checksum differs, or the
            index's slices are not all of each parameter; the message names the file.
    """
    files = manifest(folder)
    mine = list(files.items())[share::shares]
    with progress_bar(f"verifying {folder}", total=sum(facts["bytes"] for _, facts in mine)) as bar:
        for name, facts in mine:
            check_file(folder / name, facts, bar.update)
    if share == 0:
        read_index(folder, files)
        _check_counters(folder / STATE)


def check_file(
    path: Path, facts: Facts, read: Callable[[int], object] = lambda count: None
) -> None:
    """Compares one file with its entry.

    Raises:
        CheckpointError: it is missing or differs.
    """
    try:
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            raise CheckpointError(f"{path} is missing")
        if size != facts["bytes"]:
            raise CheckpointError(f"{path} has {size} bytes, the manifest says {facts['bytes']}")
        found = sha256_of_file(path, read)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if found != facts["sha256"]:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the manifest's")


def _check_counters(path: Path) -> None:
    """Refuses counters that are no numbers, and a training run (which says its world size) that
    lacks one."""
    state = read_json(path)
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    for name in _COUNTERS:
        value = state.get(name)
        if (name in state or "world_size" in state) and (type(value) is not int or value < 0):
            raise CheckpointError(f"{path}: {name} is {value!r}; expected a non-negative integer")
