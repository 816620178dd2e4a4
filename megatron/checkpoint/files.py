"""Files that are complete or absent: fsync, rename, checksums."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; the message names the file."""


def write_text(path: Path, text: str) -> None:
    """Replaces a file atomically; after a crash it has its old or its new content."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path, content: Any) -> None:
    """Writes JSON atomically."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """Reads JSON.

    Raises:
        CheckpointError: the file is missing or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None


def sync_file(path: Path) -> None:
    """Makes sure that a written file is on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Makes sure that renames in a folder are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checksum(path: Path) -> str:
    """SHA-256 of a file, as ``sha256sum`` prints it."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
