"""Reads indexed datasets: the .idx is memory-mapped, the .bin read where it is needed."""

from __future__ import annotations

import operator
import os
import struct
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from megatron.util.digests import digest_of_parts, digest_of_sample

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPE_OF_CODE: dict[int, np.dtype] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, dtype code, number of sequences, number of document boundaries."""


def best_dtype(vocab_size: int | None) -> np.dtype:
    """The token dtype that Megatron uses: uint16 below a vocabulary of 65,500, else int32."""
    return np.dtype("<u2") if vocab_size is not None and vocab_size < 65_500 else np.dtype("<i4")


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(prefix)}.idx")


def mark_path(prefix: str | os.PathLike[str]) -> Path:
    """The file that says which tokenizer made a dataset."""
    return Path(f"{prefix}.tokenizer")


def read_mark(path: Path) -> Any:
    """The `TokenizerMark` in a file (megatron/tokenizer/mark.py); None where it is not known.
    Raises ValueError if the file is malformed."""
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            content = file.read(_MARK_BYTES)
        from megatron.tokenizer.mark import parsed_mark  # a dataset may have no tokenizer

        return parsed_mark(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


_MARK_BYTES = 4096
"""Bytes read of a mark, which has some 150."""

# Opening checks up to this many blocks of entries, evenly spaced: all of them below 16 million.
_BLOCK = 1 << 18
_BLOCKS_AT_OPENING = 64


class IndexFile:
    """Lengths, offsets and document boundaries of the sequences of a `.bin`. Opening a huge file
    checks a part of its entries; `verify` checks all of them. Raises ValueError if the file is
    damaged or cut short."""

    dtype: np.dtype
    """Dtype of the tokens."""
    sequence_lengths: npt.NDArray[np.int32]
    """Tokens in each sequence, int32[n]."""
    sequence_offsets: npt.NDArray[np.int64]
    """Byte offset of each sequence in the .bin, int64[n]."""
    document_indices: npt.NDArray[np.int64]
    """Document d is made of the sequences document_indices[d] up to document_indices[d + 1]."""
    modes: npt.NDArray[np.int8] | None
    """Mode of each sequence, int8[n]; None for text."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.name = name or str(path)
        self._map(path)
        self._check_entries(_BLOCKS_AT_OPENING)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    @property
    def bin_bytes(self) -> int:
        if not len(self):
            return 0
        return int(self.sequence_offsets[-1]) + self._bytes_of(len(self) - 1)

    def _bytes_of(self, sequence: int) -> int:
        return int(self.sequence_lengths[sequence]) * self.dtype.itemsize

    def check_bin_size(self, name: str, size: int) -> None:
        """Compare the size of a .bin with the expected one; ValueError names the likely cause."""
        if size != self.bin_bytes:
            cause = (
                "the .bin was cut short (an interrupted copy, a full disk)"
                if size < self.bin_bytes
                else "the two files come from different runs, or the .idx is older than the .bin"
            )
            raise ValueError(
                f"{name} has {size} bytes, but {self.name} expects {self.bin_bytes}: {cause}; "
                "copy both files again or run the preprocessing again"
            )

    def span(self, sequence: int) -> tuple[int, int]:
        """The byte of the .bin that a sequence starts at, and its number of tokens; ValueError
        names the file and the sequence if its entries are damaged."""
        start, tokens = self._offsets[sequence], self._lengths[sequence]
        last = sequence + 1 == len(self._lengths)
        stop = self.bin_bytes if last else self._offsets[sequence + 1]
        if start < 0 or stop - start != tokens * self.dtype.itemsize:
            raise self._wrong_offset(sequence, stop)
        return start, tokens

    def verify(self) -> None:
        """Check every entry; ValueError names the file and the first bad sequence or document."""
        self._check_entries(None)

    def _map(self, path: Path) -> None:
        size = path.stat().st_size
        if size < HEADER.size:
            raise ValueError(
                f"{self.name} has {size} bytes, less than the {HEADER.size} of its header: "
                "it was cut short; copy the file again or run the preprocessing again"
            )
        raw = map_file(path, np.dtype("u1"))
        magic, version, code, sequences, boundaries = HEADER.unpack(raw[: HEADER.size].tobytes())
        if magic != MAGIC:
            raise ValueError(
                f"{self.name} starts with {magic!r}, not {MAGIC!r}: it is not a Megatron index "
                "(mmap) file"
            )
        if version != VERSION:
            raise ValueError(
                f"{self.name} has format version {version}; only {VERSION} is supported"
            )
        if code not in DTYPE_OF_CODE:
            raise ValueError(
                f"{self.name} has dtype code {code}; expected one of "
                + ", ".join(f"{c} ({d.name})" for c, d in DTYPE_OF_CODE.items())
            )
        expected = HEADER.size + 12 * sequences + 8 * boundaries
        if size not in (expected, expected + sequences):
            raise ValueError(
                f"{self.name} has {size} bytes, but its header ({sequences} sequences, "
                f"{boundaries} document boundaries) requires {expected}: "
                + ("it was cut short" if size < expected else "something was appended to it")
                + "; copy the file again or run the preprocessing again"
            )
        self.dtype = DTYPE_OF_CODE[code]
        lengths_end = HEADER.size + 4 * sequences
        offsets_end = lengths_end + 8 * sequences
        self.sequence_lengths = raw[HEADER.size : lengths_end].view("<i4")
        self.sequence_offsets = raw[lengths_end:offsets_end].view("<i8")
        self.document_indices = raw[offsets_end:expected].view("<i8")
        # Single entries of them are read several times as fast as an array's.
        self._lengths = _entries(raw[HEADER.size : lengths_end], "i")
        self._offsets = _entries(raw[lengths_end:offsets_end], "q")
        self.modes = raw[expected:].view("i1") if size > expected else None

    def _check_entries(self, max_blocks: int | None) -> None:
        lengths, offsets = self.sequence_lengths, self.sequence_offsets
        bounds = self.document_indices
        if not len(bounds) or bounds[0] != 0 or bounds[-1] != len(self):
            ends = f"{bounds[0]} and {bounds[-1]}" if len(bounds) else "missing"
            raise ValueError(
                f"{self.name}: the first and last document boundary must be 0 and {len(self)} "
                f"(its number of sequences), but are {ends}; the file is damaged"
            )
        if len(self) and offsets[0] != 0:
            raise ValueError(
                f"{self.name}: sequence 0 starts at byte {offsets[0]}, not 0; the file is damaged"
            )
        for start, stop in _blocks(len(self), max_blocks):
            if lengths[start:stop].min() < 0:
                bad = start + int(np.argmax(lengths[start:stop] < 0))
                raise ValueError(
                    f"{self.name}: sequence {bad} has the length {lengths[bad]}; the file is "
                    "damaged"
                )
            steps = np.diff(offsets[start : stop + 1])
            sizes = lengths[start : start + len(steps)].astype(np.int64) * self.dtype.itemsize
            if not np.array_equal(steps, sizes):
                bad = start + int(np.argmax(steps != sizes))
                raise self._wrong_offset(bad, int(offsets[bad + 1]))
        for start, stop in _blocks(len(bounds), max_blocks):
            steps = np.diff(bounds[start : stop + 1])
            if (steps < 0).any():
                bad = start + int(np.argmax(steps < 0))
                raise ValueError(
                    f"{self.name}: document {bad} starts at sequence {bounds[bad]} and ends before "
                    f"it, at {bounds[bad + 1]}; the file is damaged"
                )

    def _wrong_offset(self, sequence: int, stop: int) -> ValueError:
        return ValueError(
            f"{self.name}: sequence {sequence} has {self.sequence_lengths[sequence]} tokens of "
            f"{self.dtype.itemsize} bytes from byte {self.sequence_offsets[sequence]} on, but the "
            f"next one starts at byte {stop}; the file is damaged"
        )


def _entries(raw: np.ndarray, code: Literal["i", "q"]) -> Sequence[int]:
    """Bytes as native integers."""
    return memoryview(raw.data).cast(code) if len(raw) else ()


def digest_of_lengths(lengths: np.ndarray) -> str:
    """Digest of int32[n]."""
    blocks = (lengths[start : start + _BLOCK] for start in range(0, len(lengths), _BLOCK))
    return digest_of_parts(np.ascontiguousarray(block).data for block in blocks)


def map_file(path: Path, dtype: np.dtype) -> np.ndarray:
    """A whole file as a read-only array."""
    if not path.stat().st_size:  # the operating system maps no empty file
        return np.empty(0, dtype)
    return np.memmap(path, dtype, mode="r").view(np.ndarray)


def _blocks(count: int, max_blocks: int | None) -> Iterator[tuple[int, int]]:
    total = -(-count // _BLOCK)
    checked = total if max_blocks is None else min(total, max_blocks)
    for i in range(checked):
        block = i * (total - 1) // max(checked - 1, 1)  # evenly spaced from the first to the last
        yield block * _BLOCK, min(block * _BLOCK + _BLOCK, count)


class Tokens(Protocol):
    """The content of a .bin."""

    def __len__(self) -> int:
        """Number of tokens."""

    def __getitem__(self, part: slice, /) -> np.ndarray:
        """The tokens of a slice, whose start and stop are within the file; read-only."""


class FileTokens:
    """The tokens of a local .bin. They are read and not mapped: a process that touches the mapping
    of a file that was cut short since is killed by SIGBUS, a read says what is missing, and costs
    no more. Raises ValueError for what the file no longer has, OSError if it cannot be read."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self._path, self._dtype, self._width = path, dtype, dtype.itemsize
        self._file = path.open("rb", buffering=0)
        self._descriptor = self._file.fileno()
        self._count = os.fstat(self._descriptor).st_size // self._width

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice, /) -> np.ndarray:
        start, size = part.start * self._width, (part.stop - part.start) * self._width
        try:
            content = os.pread(self._descriptor, size, start)
            while len(content) < size:  # the system reads up to 2 GiB at a time
                more = os.pread(self._descriptor, size - len(content), start + len(content))
                if not more:
                    raise self._cut_short()
                content += more
        except OSError as error:
            raise OSError(f"{self._path} cannot be read: {error.strerror}") from error
        return np.frombuffer(content, self._dtype)

    def _cut_short(self) -> ValueError:
        return ValueError(
            f"{self._path} was cut short while it was read: it had "
            f"{self._count * self._width} bytes and has "
            f"{os.fstat(self._descriptor).st_size}; restore it, and resume from the last checkpoint"
        )


class IndexedDataset(Sequence[np.ndarray]):
    """Read-only view of `prefix.bin` and `prefix.idx`; item i is sequence i. Items are read-only
    arrays of dtype `.dtype`. The arrays are those of `IndexFile`. Unpickling (in loader workers)
    reopens the files. Raises FileNotFoundError if one of the two files is missing, ValueError if
    the files are damaged, cut short, or do not belong together."""

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        for path in (idx_path(prefix), bin_path(prefix)):
            if not path.is_file():
                raise FileNotFoundError(_missing_message(self.prefix, path))
        path = bin_path(prefix)
        index = IndexFile(idx_path(prefix))
        index.check_bin_size(str(path), path.stat().st_size)
        self._read_from(index, FileTokens(path, index.dtype))

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
        """`length` tokens (default: the rest) of sequence `index`, starting at token `offset`;
        IndexError if they do not exist, ValueError if its entries in the .idx are damaged or the
        .bin was cut short."""
        index, count = operator.index(index), len(self.sequence_lengths)
        if not -count <= index < count:
            raise IndexError(f"sequence {index} of {self.index_file.name}, which has {count}")
        index %= count
        start, available = self.index_file.span(index)
        length = available - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > available:
            raise IndexError(
                f"tokens {offset} to {offset + length} of sequence {index} of {self.prefix}.bin, "
                f"which has {available} tokens"
            )
        start = start // self.dtype.itemsize + offset
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
        """Identifies the sequence lengths: equal if and only if they are equal."""
        return digest_of_lengths(self.sequence_lengths)

    def bin_identity(self) -> dict[str, int | str]:
        """JSON values that differ between .bin files and between versions of one."""
        stat = bin_path(self.prefix).stat()
        return {"bytes": stat.st_size, "modified": stat.st_mtime_ns}

    def content(self) -> dict[str, int | str]:
        """JSON values that differ between contents, wherever the files are: sizes, all lengths, and
        a sample of the tokens."""
        return {
            "bytes": self.index_file.bin_bytes,
            "documents": self.num_documents,
            "lengths": self.lengths_digest,
            "sample": digest_of_sample(bin_path(self.prefix)),
        }

    def check_ids(self, extremes: np.ndarray, vocab_size: int | None) -> None:
        """Check that token ids are in a vocabulary; without one, that they are not negative.
        `extremes` are the smallest and the largest id with their positions in the .bin, int64[2,
        2]."""
        for token, position in extremes.tolist():
            if token >= 0 and (vocab_size is None or token < vocab_size):
                continue
            byte = position * self.dtype.itemsize
            sequence = int(np.searchsorted(self.sequence_offsets, byte, side="right")) - 1
            where = f"{self.prefix}.bin: sequence {sequence} contains the token id {token}"
            if vocab_size is None:
                raise ValueError(f"{where}; ids start at 0: the file is damaged")
            raise ValueError(
                f"{where}, but the vocabulary has "
                f"{vocab_size} ids (0 to {vocab_size - 1}). The file was preprocessed with another "
                "tokenizer: compare --tokenizer-type, --vocab-file, --tokenizer-model and "
                "--vocab-size with those of the preprocessing"
            )

    def limit_ids(self, vocab_size: int) -> bool:
        """Check token ids as they are read if checking them in advance is too expensive. Return
        True if so."""
        return False

    def verify(self) -> None:
        """Check every entry of the .idx; see `IndexFile.verify`."""
        self.index_file.verify()


def _missing_message(prefix: str, path: Path) -> str:
    message = f"{path} does not exist; a data path is the prefix of a .bin and an .idx file"
    if path.exists():
        return f"{path} is not a file; a data path is the prefix of a .bin and an .idx file"
    if prefix.endswith((".bin", ".idx")):
        return f"{message}: give {prefix[:-4]}, without the ending"
    if path.suffix == ".idx" and bin_path(prefix).is_file():
        return f"{message}; its .bin exists: the run that wrote it has not finished"
    return message


class TokenExtremes:
    """The smallest and largest of token ids that come in blocks, each with its position."""

    def __init__(self) -> None:
        self._smallest: list[int] = []
        self._largest: list[int] = []

    def add(self, start: int, tokens: np.ndarray) -> None:
        """A block, not empty, that starts at a position in the .bin."""
        low, high = int(tokens.argmin()), int(tokens.argmax())
        if not self._smallest or tokens[low] < self._smallest[0]:
            self._smallest = [int(tokens[low]), start + low]
        if not self._largest or tokens[high] > self._largest[0]:
            self._largest = [int(tokens[high]), start + high]

    def array(self) -> np.ndarray:
        """int64[2, 2], (id, position) of both; zeros without a block."""
        return np.array([self._smallest or [0, 0], self._largest or [0, 0]], np.int64)
