"""The .idx of a job, from the lengths that it wrote, in constant memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron.data.indexed.dataset import CODE_OF_DTYPE, HEADER, MAGIC, VERSION
from megatron.util.files import sync

_ENTRIES = 1 << 20


def write_index(prefix: Path, dtype: np.dtype, sequences: int, documents: int) -> None:
    """Writes PREFIX.idx from PREFIX.lengths and PREFIX.documents (int32, see `job`).

    Args:
        dtype: of the tokens.
        sequences: number of lengths that count.
        documents: number of documents that count.

    Raises:
        OSError: it cannot be written, as on a full disk.
    """
    dtype = dtype.newbyteorder("<")
    name = prefix.name
    path = prefix.with_name(f"{name}.idx")
    lengths, counts = prefix.with_name(f"{name}.lengths"), prefix.with_name(f"{name}.documents")
    try:
        with path.open("wb") as file:
            code = CODE_OF_DTYPE[dtype]
            file.write(HEADER.pack(MAGIC, VERSION, code, sequences, documents + 1))
            for block in _blocks(lengths, sequences):
                file.write(block.data)
            for block, before in _sums(lengths, sequences):
                file.write(((before - block) * dtype.itemsize).data)
            file.write(np.zeros(1, "<i8").data)
            for _, bounds in _sums(counts, documents):
                file.write(bounds.data)
            sync(file)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _blocks(path: Path, count: int) -> Iterator[np.ndarray]:
    with path.open("rb") as file:
        for start in range(0, count, _ENTRIES):
            size = min(_ENTRIES, count - start)
            block = np.frombuffer(file.read(4 * size), "<i4")
            assert len(block) == size
            yield block


def _sums(path: Path, count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Blocks, and for each entry the sum of all up to it, itself included (int64)."""
    total = np.int64(0)
    for block in _blocks(path, count):
        sums = np.cumsum(block, dtype="<i8") + total
        yield block, sums
        total = sums[-1]
