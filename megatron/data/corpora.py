"""Data sources, and the expansion of a path to its files."""

from __future__ import annotations

import glob
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.config import ConfigError

INDEXED = "indexed"
READ_IN_PLACE = (".json", ".jsonl", ".csv", ".tsv", ".txt", ".tfrecord", ".tfrecords")
"""File name suffixes that are read from a folder of data that is not indexed."""


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class DataSource:
    """Files of one kind that share one weight, divided among them in proportion to their tokens."""

    paths: tuple[str, ...]
    """Prefixes of indexed files, or paths of other files."""
    kind: str = INDEXED
    """Key of the `SourceReader` for the files in `DatasetBuilder.readers`."""
    weight: float | None = None
    """Weight relative to the blend's other sources; None to weight by the number of tokens."""
    share: tuple[float, float] = (0.0, 1.0)
    """Range of the documents that is used, as fractions of their number."""
    text_key: str | None = None
    """JSON key of the text; None for the key that the flags select."""
    make: Callable[[], None] = field(default=_nothing, compare=False, repr=False)
    """Function called before the files are opened, to create local copies that do not exist."""


def parse_range(first: str, last: str, where: str) -> tuple[float, float]:
    """Return a range of documents as fractions of their number. An empty `first` means 0, an empty
    `last` 1. Raises ConfigError, whose message begins with `where`, if the range is malformed."""
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
    """Return the sorted files for a path: a file, a folder (files at any depth that end in one of
    `endings`), or a glob. Raises FileNotFoundError if none is found, and ValueError for a URL."""
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
