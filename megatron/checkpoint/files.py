"""Checkpoint files: JSON and safetensors, flushed to the disk and hashed while they are written.

Tensors are read with the ``safetensors`` package, but training state is not written with it. The
package sorts tensors by name, needs all of them on the CPU at once, and would require a second pass
over the file for the checksum (15 % more time on a CPU).
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

from megatron.util.files import naming, read_regular, sync, sync_path, write_whole
from megatron.util.json_text import parse_json
from megatron.util.phases import moved

_DTYPES = {torch.float32: "F32", torch.uint8: "U8"}
_BLOCK_BYTES = 2**22
"""Number of bytes that are hashed and written at a time, small enough for the CPU's cache."""

Facts = dict[str, Any]
"""A file's manifest entry: its size ``bytes``, and its ``sha256``."""


class CheckpointError(ValueError):
    """Raised if a checkpoint cannot be read or written. The message includes the path."""


class DamagedError(CheckpointError):
    """Raised if a checkpoint does not contain what was saved. An older one may be intact."""


class NotFiniteError(CheckpointError):
    """Raised if weights or moments to be saved are not finite. The message names a tensor."""


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically and flush it to the disk."""
    write_whole(path, text.encode())
    sync_path(path.parent)


def stage_text(path: Path, text: str) -> Path:
    """Write text to a temporary file that can later be renamed to ``path``, and return the
    temporary path. After this, a full disk cannot prevent the rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        write_bytes(temporary, text.encode())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def write_bytes(path: Path, content: bytes) -> Facts:
    """Write a new file to the disk. Return its manifest entry. A failure leaves a partial file."""
    return _write(path, [memoryview(content)])


@dataclass(frozen=True)
class LazyTensor:
    """Float32 tensor that is computed only when it is written, so that the tensors of a checkpoint
    are not all in memory at once. ``make`` returns its elements, flat."""

    shape: tuple[int, ...]
    make: Callable[[], Tensor]
    dtype = torch.float32

    @property
    def nbytes(self) -> int:
        return 4 * math.prod(self.shape)

    def view(self, shape: tuple[int, ...]) -> LazyTensor:
        """Return the same tensor with another shape."""
        return LazyTensor(shape, self.make)

    def made(self) -> Tensor:
        """Compute and return the tensor."""
        return self.make().view(self.shape)


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor | LazyTensor],
    finite_in: torch.dtype | None = None,
) -> Facts:
    """Write float32 or uint8 tensors, by name, to a new safetensors file, flush it to the disk and
    return its manifest entry. GPU tensors are copied to the CPU one by one. On failure, a partial
    file remains. Raises NotFiniteError if ``finite_in`` is given and an element is not finite in
    that dtype."""

    def contents() -> Iterator[memoryview]:
        yield memoryview(_header(tensors))
        for tensor in tensors.values():
            if not tensor.nbytes:
                continue
            flat = _values(tensor).to("cpu").contiguous().view(-1)
            for block in flat.split(_BLOCK_BYTES // flat.element_size()):
                if finite_in is not None and not _all_finite(block, finite_in):
                    raise NotFiniteError(f"{path.name}: {not_finite(tensors, finite_in)}")
                moved()
                yield block.numpy().data.cast("B")

    return _write(path, contents())


def not_finite(tensors: Mapping[str, Tensor | LazyTensor], dtype: torch.dtype) -> str | None:
    """Return a message with the tensors' names and number of elements that are not finite in
    ``dtype``. Return None if all elements are finite."""
    counts: dict[str, tuple[int, int]] = {}
    for name, tensor in tensors.items():
        flat = _values(tensor).reshape(-1)
        blocks = flat.split(_BLOCK_BYTES // flat.element_size())
        bad = sum(
            int(block.to(dtype).isfinite().logical_not().sum())
            for block in blocks
            if not _all_finite(block, dtype)
        )
        if bad:
            counts[name] = bad, flat.numel()
    if not counts:
        return None
    (name, (bad, numel)), *more = counts.items()
    beyond = "" if dtype == torch.float32 else f" in {str(dtype).removeprefix('torch.')}"
    message = f"{name} has {bad:,} of {numel:,} elements that are not finite{beyond}"
    if more:
        total = sum(bad for bad, _ in counts.values())
        message += f" (in all {total:,} elements of {len(counts)} tensors)"
    return message


def _values(tensor: Tensor | LazyTensor) -> Tensor:
    return (tensor.made() if isinstance(tensor, LazyTensor) else tensor).detach()


def _all_finite(values: Tensor, dtype: torch.dtype) -> bool:
    """Return whether all elements are finite in a dtype. Checking only the minimum and maximum
    takes one pass and no copy. Both are NaN if any element is."""
    if not values.numel() or not values.is_floating_point():
        return True
    return bool(torch.stack(torch.aminmax(values)).to(dtype).isfinite().all())


def _header(tensors: Mapping[str, Tensor | LazyTensor]) -> bytes:
    """Return a safetensors header: the JSON's length (8 bytes, little endian), then JSON with the
    dtype, shape and offsets of each tensor, padded with spaces to a multiple of 8 bytes."""
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
    """Write and hash blocks with the GIL released. (Hashing in a second thread was slower.)"""
    digest, size = hashlib.sha256(), 0
    with naming(path), open(path, "xb", buffering=0) as file:
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
    """Return a value as JSON text, indented like all of this project's files."""
    return json.dumps(content, indent=1) + "\n"


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file atomically and flush it to the disk."""
    write_text(path, json_text(content))


def read_json(path: Path, **accepted: bool) -> Any:
    """Return the content of a JSON file. ``accepted`` are options of :func:`parse_json`. Raises
    CheckpointError if the file is missing or not valid JSON."""
    return json_of(path, read_bytes(path), **accepted)


def read_bytes(path: Path) -> bytes:
    """Return a file's content. Raises CheckpointError if it is missing or cannot be read."""
    try:
        return read_regular(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def json_of(path: Path, content: bytes, **accepted: bool) -> Any:
    """Parse the content of the JSON file ``path``, with :func:`read_json`'s options and errors."""
    try:
        return parse_json(content, str(path), **accepted)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
