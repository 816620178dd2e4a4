"""Files that are complete or absent: fsync, rename, checksums."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megatron.util.digests import sha256
from megatron.util.files import sync, sync_path, write_whole

Facts = dict[str, int | str]
"""What a manifest says of a file: ``bytes`` and ``sha256``."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; the message names the file."""


def write_text(path: Path, text: str) -> None:
    """Replaces a file atomically; after a crash it has its old or its new content."""
    write_whole(path, text.encode())
    sync_path(path.parent)


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
        sync(file)
    return {"bytes": len(content), "sha256": sha256(content)}


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
