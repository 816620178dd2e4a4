"""Files that appear whole or not at all, and reach the disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path, suffix: str = "") -> Iterator[Path]:
    """A file to write, which takes the place of another at once when the block ends.

    Until then, and when the block fails, what was there stays. What must survive a crash of the
    machine is to be brought to the disk (:func:`sync`) in the block.

    Args:
        path: the file to write or replace.
        suffix: how the temporary file's name has to end.

    Returns:
        Path of the temporary file, which is not there yet, in the same folder.

    Raises:
        OSError: the file cannot be replaced.
    """
    part = path.with_name(f"{path.name}.partial-{os.urandom(16).hex()}{suffix}")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Writes a file, or replaces it, at once, on the disk.

    Raises:
        OSError: it cannot be written; what was there before still is.
    """
    with replacing(path) as part, part.open("xb") as file:
        file.write(content)
        sync(file)


def sync(file: IO[bytes] | IO[str]) -> None:
    """Brings what was written to an open file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Brings a written file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
