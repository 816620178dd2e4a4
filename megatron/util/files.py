"""Files that appear completely or not at all, and reach the disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path, suffix: str = "") -> Iterator[Path]:
    """A temporary file in the folder of ``path``, which replaces it atomically when the block ends
    without an error. To survive a crash of the machine, call :func:`sync` in the block. Raises
    OSError if the file cannot be replaced."""
    part = path.with_name(f"{path.name}.partial-{os.urandom(16).hex()}{suffix}")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def remove_partial(folder: Path) -> None:
    """Deletes the temporary files of :func:`replacing` that killed processes left in a folder or
    those in it, where no other process writes now."""
    for path in folder.rglob("*.partial-*"):
        path.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Writes or replaces a file atomically, on the disk. Raises OSError if it cannot be written;
    the old file stays."""
    with replacing(path) as part, part.open("xb") as file:
        file.write(content)
        sync(file)


def sync(file: IO[bytes] | IO[str]) -> None:
    """Flushes an open file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Flushes a written file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
