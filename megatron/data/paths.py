"""The files of a path that the user gave: a file, a folder or a glob."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

READ_IN_PLACE = (".json", ".jsonl", ".csv", ".tsv", ".txt", ".tfrecord", ".tfrecords")
"""Endings of files in a folder of data that is not indexed."""


def expand(pattern: str, endings: Sequence[str]) -> list[Path]:
    """The sorted files of a path: a file, a folder (its files at any depth with one of some
    endings), or a glob; FileNotFoundError if without any, ValueError for a URL."""
    if "://" in pattern:
        raise ValueError(
            f"{pattern} is a URL; only .bin/.idx files can be read from URLs, by --data-path and "
            "its like: copy the data here first"
        )
    path = Path(pattern)
    if path.is_dir():
        files = (p for p in path.rglob("*") if p.is_file() and not _is_ours(p, path))
        found = sorted(p for p in files if p.name.endswith(tuple(endings)))
        if not found:
            raise FileNotFoundError(f"{pattern} is a folder without files *{' *'.join(endings)}")
        return found
    if path.exists():
        return [path]
    found = sorted(p for p in map(Path, glob.glob(pattern, recursive=True)) if not p.is_dir())
    if not found:
        is_glob = glob.escape(pattern) != pattern
        raise FileNotFoundError(f"{pattern} {'matches no file' if is_glob else 'does not exist'}")
    return found


def _is_ours(path: Path, folder: Path) -> bool:
    *folders, name = path.relative_to(folder).parts
    return ".partial" in name or any(
        each == "index-cache" or each.endswith(".preprocessing") for each in folders
    )
