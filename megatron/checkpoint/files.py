"""Files that are complete or absent: fsync, rename, checksums taken on the way.

Safetensors files too (github.com/huggingface/safetensors): the header's length, 8 bytes, little
endian; the header, JSON that gives each tensor's dtype, shape and place, padded with spaces to 8
bytes; the tensors, one after the other. The ``safetensors`` package reads them; its writer would
leave a file to be read again for the checksum.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.util.files import sync, sync_path, write_whole

_DTYPES = {torch.float32: "F32", torch.uint8: "U8"}
_BLOCK_BYTES = 2**22
"""Bytes that go through the checksum and into the file at a time, while the caches have them."""

Facts = dict[str, Any]
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
    return _write(path, [memoryview(content)])


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Facts:
    """Writes a safetensors file that is not there yet, to the disk.

    Checksum and writing leave Python's lock to others. Tensors on a GPU come to the host one by
    one.

    Args:
        path: the file.
        tensors: float32 or uint8, by name.

    Raises:
        OSError: it is there, or it cannot be written; what was written of it stays.
    """

    def contents() -> Iterator[memoryview]:
        yield memoryview(_header(tensors))
        for tensor in tensors.values():
            if tensor.numel():
                yield tensor.detach().to("cpu").contiguous().numpy().data.cast("B")

    return _write(path, contents())


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    content, place = {}, 0
    for name, tensor in tensors.items():
        content[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, place + tensor.nbytes],
        }
        place += tensor.nbytes
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write(path: Path, contents: Iterable[memoryview]) -> Facts:
    """Writes bytes and takes their checksum.

    A second thread for the checksum was tried: handing blocks over cost more than it saved.
    """
    digest, size = hashlib.sha256(), 0
    with open(path, "xb", buffering=0) as file:
        for content in contents:
            for start in range(0, len(content), _BLOCK_BYTES):
                block = content[start : start + _BLOCK_BYTES]
                digest.update(block)
                while block:
                    block = block[file.write(block) :]
            size += len(content)
        sync(file)
    return {"bytes": size, "sha256": digest.hexdigest()}


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
