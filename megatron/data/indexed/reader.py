"""Reads indexed datasets."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron.data.indexed.format import bin_path, idx_path
from megatron.data.indexed.index_file import IndexFile, map_file


class Tokens(Protocol):
    """The content of a .bin, wherever that lies."""

    def __len__(self) -> int:
        """Number of tokens."""

    def __getitem__(self, part: slice, /) -> np.ndarray:
        """The tokens of a slice with a start and a stop within the file; read-only."""


class IndexedDataset(Sequence[np.ndarray]):
    """Read-only, memory-mapped view of `prefix.bin` and `prefix.idx`; item i is sequence i.

    Items are read-only views into the file, of dtype `.dtype`. Pickling (loader workers) reopens
    the files instead of copying them.

    Raises:
        FileNotFoundError: one of the two files is missing.
        ValueError: the files are damaged, cut short, or do not belong together; the message names
            the file, both sizes and the likely cause.
    """

    prefix: str
    dtype: np.dtype
    sequence_lengths: npt.NDArray[np.int32]
    """Tokens in each sequence, int32[n]."""
    sequence_offsets: npt.NDArray[np.int64]
    """Byte offset of each sequence in the .bin, int64[n]."""
    document_indices: npt.NDArray[np.int64]
    """Document d holds the sequences document_indices[d] up to document_indices[d + 1]."""
    modes: npt.NDArray[np.int8] | None
    """Mode of each sequence, int8[n]; None when the file has none (text)."""

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        for path in (idx_path(prefix), bin_path(prefix)):
            if not path.is_file():
                raise FileNotFoundError(_missing_message(self.prefix, path))
        path = bin_path(prefix)
        index = IndexFile(idx_path(prefix))
        index.check_bin_size(str(path), path.stat().st_size)
        self._read_from(index, map_file(path, index.dtype))

    def _read_from(self, index: IndexFile, tokens: Tokens) -> None:
        self.index_file = index
        self.dtype = index.dtype
        self.sequence_lengths = index.sequence_lengths
        self.sequence_offsets = index.sequence_offsets
        self.document_indices = index.document_indices
        self.modes = index.modes
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, index: int) -> np.ndarray:  # type: ignore[override]
        return self.get(index)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """`length` tokens (default: the rest) of sequence `index`, from token `offset` on.

        Raises:
            IndexError: there is no such sequence, or the range leaves it.
            ValueError: its entries in the .idx are damaged.
        """
        index = operator.index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {self.index_file.name}, which holds {len(self)}")
        index %= len(self)
        available = int(self.sequence_lengths[index])
        length = available - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > available:
            raise IndexError(
                f"tokens {offset} to {offset + length} of sequence {index} of {self.prefix}.bin, "
                f"which has {available} tokens"
            )
        self.index_file.check_sequence(index)
        start = int(self.sequence_offsets[index]) // self.dtype.itemsize + offset
        return self._tokens[start : start + length]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.prefix,)

    @property
    def num_tokens(self) -> int:
        """Tokens in the whole file."""
        return len(self._tokens)

    @property
    def num_documents(self) -> int:
        """Documents in the whole file."""
        return len(self.document_indices) - 1

    def token_blocks(self, block: int = 1 << 24) -> Iterator[tuple[int, np.ndarray]]:
        """The whole .bin in file order: (number of the first token, tokens of this block)."""
        for start in range(0, len(self._tokens), block):
            yield start, self._tokens[start : min(start + block, len(self._tokens))]

    @cached_property
    def lengths_digest(self) -> str:
        """Identifies the sequence lengths, wherever the files lie: equal when those are equal."""
        return self.index_file.lengths_digest()

    def bin_identity(self) -> dict[str, int | str]:
        """Tells this .bin from another one, and from itself after a change."""
        stat = bin_path(self.prefix).stat()
        return {"bytes": stat.st_size, "modified": stat.st_mtime_ns}

    def verify(self) -> None:
        """Check every entry of the .idx, where opening a huge file looks at a part of them.

        Raises:
            ValueError: naming the file and the first bad sequence or document.
        """
        self.index_file.verify()


def _missing_message(prefix: str, path: Path) -> str:
    message = f"{path} does not exist; a data path is the prefix of a .bin and an .idx file"
    if path.exists():
        return f"{path} is no file; a data path is the prefix of a .bin and an .idx file"
    if prefix.endswith((".bin", ".idx")):
        return f"{message}: give {prefix[:-4]}, without the ending"
    if path.suffix == ".idx" and bin_path(prefix).is_file():
        return f"{message}; its .bin is there: the run that wrote it has not finished"
    return message
