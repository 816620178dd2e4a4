"""Files that are complete or absent: fsync, rename, checksums."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

Facts = dict[str, int | str]
"""What a manifest says of a file: ``bytes`` and ``sha256``."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; the message names the file."""


def write_text(path: Path, text: str) -> None:
    """Replaces a file atomically; after a crash it has its old or its new content."""
    os.replace(stage_text(path, text), path)
    sync_folder(path.parent)


def stage_text(path: Path, text: str) -> Path:
    """Writes what is going to replace a file beside it, so that nothing but a rename is left to do,
    which a full disk does not stop.

    Returns:
        The temporary file, on the disk.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        write_bytes(temporary, text.encode())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def write_bytes(path: Path, content: bytes) -> Facts:
    """Writes a file that is not there yet, to the disk.

    Raises:
        OSError: it is there, or it cannot be written; what was written of it stays.
    """
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def json_text(content: Any) -> str:
    """JSON as this project writes it."""
    return json.dumps(content, indent=1) + "\n"


def write_json(path: Path, content: Any) -> None:
    """Writes JSON atomically."""
    write_text(path, json_text(content))


def read_json(path: Path) -> Any:
    """Reads JSON.

    Raises:
        CheckpointError: the file is missing or not JSON.
    """
    return parse_json(path, read_bytes(path))


def read_bytes(path: Path) -> bytes:
    """A whole file.

    Raises:
        CheckpointError: it is missing or cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def parse_json(path: Path, content: bytes) -> Any:
    """The JSON that was read from ``path``.

    Raises:
        CheckpointError: it is none.
    """
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
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
    with open(path, "rb", buffering=0) as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()
