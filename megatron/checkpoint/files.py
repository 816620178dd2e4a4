"""Files of checkpoints: JSON and safetensors, on the disk and with a checksum once written.

The ``safetensors`` package reads tensors, but its writer is not used: it sorts the tensors by name,
needs all of them on the CPU at the same time, and leaves the checksum to a second pass over the
file (15 % more time on a CPU).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.util.files import sync, sync_path, write_whole
from megatron.util.json_text import parse_json

_DTYPES = {torch.float32: "F32", torch.uint8: "U8"}
_BLOCK_BYTES = 2**22
"""Bytes that are hashed and written at a time, while they are in the cache."""

Facts = dict[str, Any]
"""A file's entry in the manifest: ``bytes`` and ``sha256``."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; the message names the file."""


def write_text(path: Path, text: str) -> None:
    """Replaces a file atomically and durably."""
    write_whole(path, text.encode())
    sync_path(path.parent)


def stage_text(path: Path, text: str) -> Path:
    """Writes a temporary file that a rename will put in the place of ``path``; a full disk does not
    prevent the rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        write_bytes(temporary, text.encode())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def write_bytes(path: Path, content: bytes) -> Facts:
    """Writes a new file to the disk; a partly written one stays."""
    return _write(path, [memoryview(content)])


@dataclass(frozen=True)
class LazyTensor:
    """A float32 tensor of this shape that ``make`` computes, flat, when it is written, so that not
    all of a checkpoint are in memory at once."""

    shape: tuple[int, ...]
    make: Callable[[], Tensor]
    dtype = torch.float32

    @property
    def nbytes(self) -> int:
        return 4 * math.prod(self.shape)

    def view(self, shape: tuple[int, ...]) -> LazyTensor:
        """The same with another shape."""
        return LazyTensor(shape, self.make)

    def made(self) -> Tensor:
        """The tensor."""
        return self.make().view(self.shape)


def write_tensors(path: Path, tensors: Mapping[str, Tensor | LazyTensor]) -> Facts:
    """Writes float32 or uint8 tensors, by name, to a new safetensors file on the disk; a partly
    written one stays. Tensors on a GPU are copied to the host one by one."""

    def contents() -> Iterator[memoryview]:
        yield memoryview(_header(tensors))
        for tensor in tensors.values():
            if tensor.nbytes:
                tensor = tensor.made() if isinstance(tensor, LazyTensor) else tensor
                yield tensor.detach().to("cpu").contiguous().numpy().data.cast("B")

    return _write(path, contents())


def _header(tensors: Mapping[str, Tensor | LazyTensor]) -> bytes:
    """The header's length (8 bytes, little endian), and the header: JSON with each tensor's dtype,
    shape and place, padded with spaces to 8 bytes."""
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
    """Writes and hashes bytes, without Python's lock. (A second thread for the hash was slower.)"""
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
    """Reads JSON; raises CheckpointError if the file is missing or not JSON."""
    return json_of(path, read_bytes(path))


def read_bytes(path: Path) -> bytes:
    """Reads a file; raises CheckpointError if it is missing or cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def json_of(path: Path, content: bytes) -> Any:
    """What the JSON file ``path`` with this content says; raises CheckpointError if it is not
    JSON."""
    try:
        return parse_json(content, str(path))
    except ValueError as error:
        raise CheckpointError(str(error)) from None
