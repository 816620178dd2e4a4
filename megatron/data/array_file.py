"""Arrays as .npy files: written in blocks, memory-mapped, refused when they are damaged."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from megatron.util.digests import digest_of_parts
from megatron.util.files import sync

_DIGEST_BLOCK = 1 << 20
_DIGEST_BLOCKS = 64


class Blocks(NamedTuple):
    """An array that is written while it is made, so that memory never holds all of it."""

    dtype: np.dtype
    shape: tuple[int, ...]
    blocks: Iterable[np.ndarray]
    """Along the first dimension; together they have `shape`."""

    def array(self) -> np.ndarray:
        """The array in memory."""
        array = np.empty(self.shape, self.dtype)
        row = 0
        for block in self.blocks:
            array[row : row + len(block)] = block
            row += len(block)
        assert row == len(array)
        return array


def write_array(file: Path, array: np.ndarray | Blocks) -> None:
    """Writes an array as a .npy, to the disk."""
    with file.open("wb") as stream:
        if isinstance(array, Blocks):
            header = np.lib.format.header_data_from_array_1_0(np.empty(0, array.dtype))
            np.lib.format.write_array_header_1_0(stream, header | {"shape": array.shape})
            rows = 0
            for block in array.blocks:
                stream.write(np.ascontiguousarray(block, array.dtype).data)
                rows += len(block)
            assert rows == array.shape[0]
        else:
            np.save(stream, array, allow_pickle=False)
        sync(stream)


def map_array(file: Path) -> np.ndarray:
    """The memory-mapped array of a .npy that `write_array` wrote.

    Raises:
        ValueError: the file is damaged; the message names it.
    """
    with file.open("rb") as stream:
        try:
            dtype, shape, order = _read_header(stream)
        except Exception as error:  # NumPy's reader of headers lets errors of many kinds through
            if isinstance(error, OSError):
                raise
            raise ValueError(f"{file.name} has no NumPy header ({error})") from None
        offset = stream.tell()
        size = os.fstat(stream.fileno()).st_size
    expected = offset + dtype.itemsize * math.prod(shape)
    if size != expected:
        raise ValueError(f"{file.name} has {size} bytes, not {expected}")
    if size == offset:  # the operating system maps nothing of size 0
        return np.empty(shape, dtype)
    return np.memmap(file, dtype, "r", offset, shape, order)


def _read_header(stream: BinaryIO) -> tuple[np.dtype, tuple[int, ...], Any]:
    version = np.lib.format.read_magic(stream)
    if version != (1, 0):  # as this module writes it
        raise ValueError(f"format version {version}")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    if dtype.kind not in "biuf" or any(not 0 <= length < 1 << 48 for length in shape):
        raise ValueError(f"{dtype} of shape {shape}")
    return dtype, shape, "F" if fortran else "C"


def digest_of(array: np.ndarray) -> str:
    """Of shape, dtype and content; of large arrays, evenly spaced blocks up to 64 MiB."""
    return digest_of_parts(chain((f"{array.dtype.str}{array.shape}",), _some_blocks(array)))


def _some_blocks(array: np.ndarray) -> Iterator[memoryview]:
    raw = array.reshape(-1).view(np.uint8)
    blocks = -(-len(raw) // _DIGEST_BLOCK)
    looked_at = min(blocks, _DIGEST_BLOCKS)
    for i in range(looked_at):
        start = i * (blocks - 1) // max(looked_at - 1, 1) * _DIGEST_BLOCK
        yield np.ascontiguousarray(raw[start : start + _DIGEST_BLOCK]).data
