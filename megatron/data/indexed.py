"""Megatron's indexed datasets, `PREFIX.bin` and `PREFIX.idx` (little endian).

    .bin   the tokens of all sequences, concatenated
    .idx   magic "MMIDIDX\\0\\0" | uint64 version 1 | uint8 dtype code
           | uint64 number of sequences n | uint64 number of document boundaries d
           | int32[n] tokens in each sequence | int64[n] byte offset of each sequence in .bin
           | int64[d] document boundaries: sequence numbers, the first 0, the last n
           | int8[n] mode of each sequence (multimodal data only)

A document is one or more sequences; a GPT corpus has one sequence per document. The .idx is
memory-mapped. The .bin is read on demand.
"""

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
"""Fields: magic, version, dtype code, number of sequences, number of document boundaries."""


def best_dtype(vocab_size: int | None) -> np.dtype:
    """Return Megatron's token dtype: uint16 for vocabularies below 65,500, else int32."""
    return np.dtype("<u2") if vocab_size is not None and vocab_size < 65_500 else np.dtype("<i4")


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(prefix)}.idx")


def mark_path(prefix: str | os.PathLike[str]) -> Path:
    """Return the path of the file that records which tokenizer produced a dataset."""
    return Path(f"{prefix}.tokenizer")


def read_mark(path: Path) -> Any:
    """Return the `TokenizerMark` in a file (megatron/tokenizer/mark.py), or None if the file is
    missing or was written by a later version. Raises ValueError if the file is malformed."""
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            content = file.read(_MARK_BYTES)
        from megatron.tokenizer.mark import parsed_mark  # only for data with a tokenizer

        return parsed_mark(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


_MARK_BYTES = 4096
"""Maximum number of bytes to read from a mark file, which has about 150."""

# Opening checks at most 64 evenly spaced blocks of entries: all entries below 16 million.
_BLOCK = 1 << 18
_BLOCKS_AT_OPENING = 64


class IndexFile:
    """Lengths, offsets and document boundaries of the sequences in a `.bin`. Opening a huge file
    checks only some of its entries; `verify` checks all. Raises ValueError if the file is damaged
    or truncated."""

    dtype: np.dtype
    """Dtype of the tokens."""
    sequence_lengths: npt.NDArray[np.int32]
    """Number of tokens in each sequence, int32[n]."""
    sequence_offsets: npt.NDArray[np.int64]
    """Byte offset of each sequence in the .bin, int64[n]."""
    document_indices: npt.NDArray[np.int64]
    """Document d has the sequences document_indices[d] to document_indices[d + 1] (exclusive)."""
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
        """Check the size of a .bin. Raises ValueError with the likely cause if it is wrong."""
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
        """Return a sequence's byte offset in the .bin and its number of tokens. Raises ValueError,
        which names the file and the sequence, if its entries are damaged."""
        start, tokens = self._offsets[sequence], self._lengths[sequence]
        last = sequence + 1 == len(self._lengths)
        stop = self.bin_bytes if last else self._offsets[sequence + 1]
        if start < 0 or stop - start != tokens * self.dtype.itemsize:
            raise self._wrong_offset(sequence, stop)
        return start, tokens

    def verify(self) -> None:
        """Check every entry. Raises ValueError, which names the first bad sequence or document."""
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
        # A memoryview reads single entries several times as fast as an array.
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
    """View bytes as a sequence of native integers, int32 ("i") or int64 ("q")."""
    return memoryview(raw.data).cast(code) if len(raw) else ()


def digest_of_lengths(lengths: np.ndarray) -> str:
    """Return the digest of sequence lengths, int32[n]."""
    blocks = (lengths[start : start + _BLOCK] for start in range(0, len(lengths), _BLOCK))
    return digest_of_parts(np.ascontiguousarray(block).data for block in blocks)


def map_file(path: Path, dtype: np.dtype) -> np.ndarray:
    """Memory-map a whole file as a read-only array."""
    if not path.stat().st_size:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype, mode="r").view(np.ndarray)


def _blocks(count: int, max_blocks: int | None) -> Iterator[tuple[int, int]]:
    total = -(-count // _BLOCK)
    checked = total if max_blocks is None else min(total, max_blocks)
    for i in range(checked):
        block = i * (total - 1) // max(checked - 1, 1)  # evenly spaced, first and last included
        yield block * _BLOCK, min(block * _BLOCK + _BLOCK, count)


class Tokens(Protocol):
    """Tokens of a .bin, wherever it is stored."""

    def __len__(self) -> int:
        """Return the number of tokens."""

    def __getitem__(self, part: slice, /) -> np.ndarray:
        """Return the tokens in a slice, which must be within the file, as a read-only array."""


class FileTokens:
    """Tokens of a local .bin. They are read, not mapped: reading a mapped page of a file that was
    truncated since kills the process with SIGBUS, while a read reports the missing bytes at no
    extra cost. Raises ValueError for a truncated file, and OSError if it cannot be read."""

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
            while len(content) < size:  # one read returns up to 2 GiB
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
    """Read-only view of `prefix.bin` and `prefix.idx`. Item i is sequence i, a read-only array of
    dtype `.dtype`. The index arrays are those of `IndexFile`. Unpickling (in loader workers)
    reopens the files. Raises FileNotFoundError if a file is missing, and ValueError if the files
    are damaged, truncated, or do not match."""

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
        """Return `length` tokens (default: all that follow) of sequence `index` from token `offset`
        on. Raises IndexError if they do not exist, and ValueError if the sequence's entries in the
        .idx are damaged or the .bin was truncated."""
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
        """Number of tokens in the whole file."""
        return len(self._tokens)

    @property
    def num_documents(self) -> int:
        """Number of documents in the whole file."""
        return len(self.document_indices) - 1

    def token_blocks(self, block: int = 1 << 24) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the whole .bin in file order, as (index of the block's first token, its tokens)."""
        for start in range(0, len(self._tokens), block):
            yield start, self._tokens[start : min(start + block, len(self._tokens))]

    @cached_property
    def lengths_digest(self) -> str:
        """Digest of the sequence lengths. Equal digests mean equal lengths."""
        return digest_of_lengths(self.sequence_lengths)

    def bin_identity(self) -> dict[str, int | str]:
        """Return JSON values that tell apart .bin files, and versions of the same file."""
        stat = bin_path(self.prefix).stat()
        return {"bytes": stat.st_size, "modified": stat.st_mtime_ns}

    def content(self) -> dict[str, int | str]:
        """Return JSON values that identify the content, independently of the path: sizes, all
        lengths, and a sample of the tokens."""
        return {
            "bytes": self.index_file.bin_bytes,
            "documents": self.num_documents,
            "lengths": self.lengths_digest,
            "sample": digest_of_sample(bin_path(self.prefix)),
        }

    def check_ids(self, extremes: np.ndarray, vocab_size: int | None) -> None:
        """Check that token ids are not negative, and below `vocab_size` unless it is None. Raises
        ValueError otherwise. `extremes` are the smallest and largest id with their positions in the
        .bin, int64[2, 2]."""
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
        """If checking all token ids in advance is too expensive, check them whenever they are read.
        Return whether this is the case."""
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
    """Smallest and largest token id in the added blocks, each with its position."""

    def __init__(self) -> None:
        self._smallest: list[int] = []
        self._largest: list[int] = []

    def add(self, start: int, tokens: np.ndarray) -> None:
        """Add a non-empty block of tokens that starts at token `start` of the .bin."""
        low, high = int(tokens.argmin()), int(tokens.argmax())
        if not self._smallest or tokens[low] < self._smallest[0]:
            self._smallest = [int(tokens[low]), start + low]
        if not self._largest or tokens[high] > self._largest[0]:
            self._largest = [int(tokens[high]), start + high]

    def array(self) -> np.ndarray:
        """Return int64[2, 2]: (id, position) of smallest and largest id; zeros without blocks."""
        return np.array([self._smallest or [0, 0], self._largest or [0, 0]], np.int64)
