"""What a path given by the user stands for: a file, the files of a folder, or those of a glob."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path


def expand(pattern: str, endings: Sequence[str]) -> list[Path]:
    """Files of a path, sorted by path where it stands for several.

    Args:
        pattern: a file, a folder (the files at any depth with one of the endings), or a glob.
        endings: of the files that are meant in a folder.

    Raises:
        FileNotFoundError: it stands for no file.
        ValueError: it is a URL.
    """
    if "://" in pattern:
        raise ValueError(
            f"{pattern} is a URL; of data elsewhere only .bin/.idx files are read, by --data-path "
            "and its like: copy it here first"
        )
    path = Path(pattern)
    if path.is_dir():
        found = sorted(p for p in files_below(path) if p.name.endswith(tuple(endings)))
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


def files_below(folder: Path) -> list[Path]:
    """Files at any depth, but for those that this project's tools keep beside data: caches, and
    what a job that is under way has written."""
    return [path for path in folder.rglob("*") if path.is_file() and not _is_ours(path, folder)]


def _is_ours(path: Path, folder: Path) -> bool:
    within = path.relative_to(folder).parts
    return (
        any(part == "index-cache" or part.endswith(".preprocessing") for part in within[:-1])
        or ".partial" in within[-1]
    )
