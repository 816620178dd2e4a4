"""Files of checkpoints: JSON and safetensors, on the disk and with a checksum once written.

The ``safetensors`` package reads tensors, but does not write training state: it sorts them by name,
needs all of them on the CPU at the same time, and leaves the checksum to a second pass over the
file (15 % more time on a CPU).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
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
"""Bytes that are hashed and written at a time, while they are in the cache."""

Facts = dict[str, Any]
"""A file's entry in the manifest: ``bytes`` and ``sha256``."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; the message names the file."""


class DamagedError(CheckpointError):
    """A checkpoint that does not contain what was saved; an older one may be whole."""


class NotFiniteError(CheckpointError):
    """Weights or moments that are not finite, and must not be saved; the message names a tensor."""


def save_tensors(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Writes a safetensors file by the ``safetensors`` package, with the permissions of any new
    file: the package's own temporary file can be read by its user alone. Raises OSError if it
    cannot be written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        save_file(tensors, path, metadata)
        path.chmod(mode)
    except (SafetensorError, OSError) as error:  # a full disk, for example
        raise OSError(f"{path} cannot be written: {error}") from None


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
    """A float32 tensor of this shape that ``make`` computes, flat, when it is written, so that a
    checkpoint's tensors are not all in memory at the same time."""

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


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor | LazyTensor],
    finite_in: torch.dtype | None = None,
) -> Facts:
    """Writes float32 or uint8 tensors, by name, to a new safetensors file on the disk; a partly
    written one stays. Tensors on a GPU are copied to the host one by one. With ``finite_in`` raises
    NotFiniteError if an element is not finite in that dtype; blocks are checked while they are in
    the cache."""

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


def finite(name: str, values: Tensor, dtype: torch.dtype, where: Path) -> Tensor:
    """The elements of a tensor of the checkpoint ``where`` in another dtype. Raises NotFiniteError
    if one is not finite in that."""
    reason = not_finite({name: values}, dtype)
    if reason is not None:
        raise NotFiniteError(f"{where}: {reason}")
    return values.to(dtype)


def not_finite(tensors: Mapping[str, Tensor | LazyTensor], dtype: torch.dtype) -> str | None:
    """Return which of these tensors, by name, have elements that are not finite in a dtype, and
    their numbers, in words; None if all are finite."""
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
    """True if all elements are finite in a dtype; of their smallest and largest, so in one pass
    without a copy (both are NaN if one element is)."""
    if not values.numel() or not values.is_floating_point():
        return True
    return bool(torch.stack(torch.aminmax(values)).to(dtype).isfinite().all())


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
    """JSON as this project writes it."""
    return json.dumps(content, indent=1) + "\n"


def write_json(path: Path, content: Any) -> None:
    """Writes JSON atomically."""
    write_text(path, json_text(content))


def read_json(path: Path, **accepted: bool) -> Any:
    """Reads JSON; raises CheckpointError if the file is missing or not JSON. ``accepted`` are the
    options of :func:`parse_json`."""
    return json_of(path, read_bytes(path), **accepted)


def read_bytes(path: Path) -> bytes:
    """Reads a file; raises CheckpointError if it is missing or cannot be read."""
    try:
        return read_regular(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def json_of(path: Path, content: bytes, **accepted: bool) -> Any:
    """Return the content of the JSON file ``path``; errors and options as of :func:`read_json`."""
    try:
        return parse_json(content, str(path), **accepted)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
