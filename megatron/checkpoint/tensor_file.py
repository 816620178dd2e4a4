"""Writes safetensors files, with their checksum taken on the way.

The format (github.com/huggingface/safetensors): the header's length, 8 bytes, little endian; the
header, JSON that gives each tensor's number format, shape and place, padded with spaces to 8 bytes;
the tensors, one behind the other. The ``safetensors`` package reads it; its writer would leave the
file to be read again for the checksum.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from megatron.checkpoint.files import Facts

_DTYPES = {torch.float32: "F32", torch.uint8: "U8"}
_BLOCK_BYTES = 2**22
"""Bytes that go through the checksum and into the file at a time, while the caches have them."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Facts:
    """Writes a new safetensors file, to the disk.

    Checksum and writing leave Python's lock to others. Tensors on a GPU come to the host one by
    one.

    Args:
        path: the file; it must not be there yet.
        tensors: float32 or uint8, by name.

    Raises:
        OSError: it cannot be written; what was written of it stays.
    """
    writer = _HashingWriter(path)
    try:
        writer.write(memoryview(_header(tensors)))
        for tensor in tensors.values():
            if tensor.numel():
                values = tensor.detach().to("cpu").contiguous()
                writer.write(values.numpy().data.cast("B"))
        return writer.finish()
    finally:
        writer.close()


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    content, place = {}, 0
    for name, tensor in tensors.items():
        end = place + math.prod(tensor.shape) * tensor.itemsize
        content[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, end],
        }
        place = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class _HashingWriter:
    """A file and the checksum of what was written to it.

    A second thread for the checksum was tried: handing blocks over cost more than it saved.
    """

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = open(path, "xb", buffering=0)  # noqa: SIM115
        self._digest, self._bytes = hashlib.sha256(), 0

    def write(self, content: memoryview) -> None:
        """Appends bytes."""
        for start in range(0, len(content), _BLOCK_BYTES):
            block = content[start : start + _BLOCK_BYTES]
            self._digest.update(block)
            while block:
                block = block[self._file.write(block) :]
        self._bytes += len(content)

    def finish(self) -> Facts:
        """Waits for the disk."""
        os.fsync(self._file.fileno())
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}

    def close(self) -> None:
        """Closes the file, whole or not."""
        self._file.close()
