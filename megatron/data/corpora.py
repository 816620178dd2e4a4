"""Sources of data, and the files of a path."""

from __future__ import annotations

import glob
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.config import ConfigError

INDEXED = "indexed"
READ_IN_PLACE = (".json", ".jsonl", ".csv", ".tsv", ".txt", ".tfrecord", ".tfrecords")
"""Endings of files in a folder of data that is not indexed."""


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class DataSource:
    """Files of one kind, which share a weight in proportion to their tokens."""

    paths: tuple[str, ...]
    """Prefixes of indexed files, or files."""
    kind: str = INDEXED
    """Name of the `SourceReader` that reads them."""
    weight: float | None = None
    """Relative to the other weights of a blend; None: its number of tokens."""
    share: tuple[float, float] = (0.0, 1.0)
    """Range of its documents that is used, in fractions of their number."""
    text_key: str | None = None
    """Key of the text in JSON; None: the one of the flags."""
    make: Callable[[], None] = field(default=_nothing, compare=False, repr=False)
    """Called before the files are opened: writes them if they are a copy that does not exist."""


def parse_range(first: str, last: str, where: str) -> tuple[float, float]:
    """A range of documents in fractions of their number; a missing end is 0 or 1. Raises
    ConfigError, whose message begins with `where`, if it is not a range."""
    try:
        start, end = float(first or 0), float(last or 1)
    except ValueError:
        start, end = 1.0, 0.0
    if not 0 <= start < end <= 1:
        raise ConfigError(
            f"{where}: the range {first}:{last} must be FIRST:LAST with 0 <= FIRST < LAST <= 1, "
            "fractions of the documents"
        )
    return start, end


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
        matches = sorted(p for p in files if p.name.endswith(tuple(endings)))
        if not matches:
            raise FileNotFoundError(f"{pattern} is a folder without files *{' *'.join(endings)}")
        return matches
    if path.exists():
        return [path]
    matches = sorted(p for p in map(Path, glob.glob(pattern, recursive=True)) if not p.is_dir())
    if not matches:
        is_glob = glob.escape(pattern) != pattern
        raise FileNotFoundError(f"{pattern} {'matches no file' if is_glob else 'does not exist'}")
    return matches


def _is_ours(path: Path, folder: Path) -> bool:
    *folders, name = path.relative_to(folder).parts
    return ".partial" in name or any(
        each == "index-cache" or each.endswith(".preprocessing") for each in folders
    )
