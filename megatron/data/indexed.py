"""Reader and writer of Megatron's indexed datasets, `PREFIX.bin` and `PREFIX.idx` (little endian).

    .bin   the tokens of all sequences, back to back
    .idx   magic "MMIDIDX\\0\\0" | uint64 version 1 | uint8 dtype code
           | uint64 number of sequences n | uint64 number of document boundaries d
           | int32[n] tokens in each sequence | int64[n] byte offset of each sequence in .bin
           | int64[d] document boundaries: sequence numbers, the first 0, the last n
           | int8[n] mode of each sequence (multimodal data only)

A document is one or more sequences; a GPT corpus has one sequence per document.
"""

import hashlib
import operator
import os
import shutil
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

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

_HEADER = struct.Struct("<9sQBQQ")
# Opening looks at up to this many blocks of entries, evenly spaced: all of them below 16 million.
_BLOCK = 1 << 18
_BLOCKS_AT_OPENING = 64


def best_dtype(vocab_size: int | None) -> np.dtype:
    """The token dtype Megatron chooses: uint16 below a vocabulary of 65,500, else int32."""
    return np.dtype("<u2") if vocab_size is not None and vocab_size < 65_500 else np.dtype("<i4")


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    """The token file of a prefix."""
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    """The index file of a prefix."""
    return Path(f"{os.fspath(prefix)}.idx")


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
        self._bin, self._idx = bin_path(prefix), idx_path(prefix)
        for path in (self._idx, self._bin):
            if not path.is_file():
                raise FileNotFoundError(_missing_message(self.prefix, path))
        self._map_index()
        self._check_bin_size()
        self._check_entries(_BLOCKS_AT_OPENING)
        self._tokens = _map(self._bin, self.dtype)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, index: int) -> np.ndarray:  # type: ignore[override]
        return self.get(index)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """`length` tokens (default: the rest) of sequence `index`, from token `offset` on.

        Raises:
            IndexError: there is no such sequence, or the range leaves it.
        """
        index = operator.index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {self._idx}, which holds {len(self)}")
        available = int(self.sequence_lengths[index])
        length = available - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > available:
            raise IndexError(
                f"tokens {offset} to {offset + length} of sequence {index} of {self._bin}, "
                f"which has {available} tokens"
            )
        start = int(self.sequence_offsets[index]) // self.dtype.itemsize + offset
        return self._tokens[start : start + length]

    def __reduce__(self) -> tuple[type["IndexedDataset"], tuple[str]]:
        return type(self), (self.prefix,)

    @property
    def num_tokens(self) -> int:
        """Tokens in the whole file."""
        return len(self._tokens)

    def token_blocks(self, block: int = 1 << 24) -> Iterator[tuple[int, np.ndarray]]:
        """The whole .bin in file order: (number of the first token, tokens of this block)."""
        for start in range(0, len(self._tokens), block):
            yield start, self._tokens[start : start + block]

    @cached_property
    def lengths_digest(self) -> str:
        """Identifies the sequence lengths, wherever the files lie: equal when those are equal."""
        digest = hashlib.blake2b(digest_size=16)
        for start in range(0, len(self), _BLOCK):
            digest.update(self.sequence_lengths[start : start + _BLOCK].tobytes())
        return digest.hexdigest()

    def verify(self) -> None:
        """Check every entry of the .idx, where opening a huge file looks at a part of them.

        Raises:
            ValueError: naming the file and the first bad sequence or document.
        """
        self._check_entries(None)

    def _map_index(self) -> None:
        size = self._idx.stat().st_size
        if size < _HEADER.size:
            raise ValueError(
                f"{self._idx} has {size} bytes, less than the {_HEADER.size} of its header: "
                "the copy or the preprocessing that wrote it was cut short"
            )
        with self._idx.open("rb") as file:
            magic, version, code, sequences, boundaries = _HEADER.unpack(file.read(_HEADER.size))
        if magic != MAGIC:
            raise ValueError(
                f"{self._idx} starts with {magic!r}, not {MAGIC!r}: it is no Megatron index "
                "(mmap) file"
            )
        if version != VERSION:
            raise ValueError(f"{self._idx} has format version {version}; only {VERSION} is known")
        if code not in DTYPE_OF_CODE:
            raise ValueError(
                f"{self._idx} has dtype code {code}; known are "
                + ", ".join(f"{c} ({d.name})" for c, d in DTYPE_OF_CODE.items())
            )
        expected = _HEADER.size + 12 * sequences + 8 * boundaries
        if size not in (expected, expected + sequences):
            raise ValueError(
                f"{self._idx} has {size} bytes, but its header ({sequences} sequences, "
                f"{boundaries} document boundaries) makes {expected}: "
                + ("it was cut short" if size < expected else "something was appended to it")
            )
        self.dtype = DTYPE_OF_CODE[code]
        raw = _map(self._idx, np.dtype("u1"))
        lengths_end = _HEADER.size + 4 * sequences
        offsets_end = lengths_end + 8 * sequences
        self.sequence_lengths = raw[_HEADER.size : lengths_end].view("<i4")
        self.sequence_offsets = raw[lengths_end:offsets_end].view("<i8")
        self.document_indices = raw[offsets_end:expected].view("<i8")
        self.modes = raw[expected:].view("i1") if size > expected else None

    def _check_bin_size(self) -> None:
        expected = 0
        if len(self):
            expected = int(self.sequence_offsets[-1])
            expected += int(self.sequence_lengths[-1]) * self.dtype.itemsize
        size = self._bin.stat().st_size
        if size != expected:
            cause = (
                "the .bin was cut short (an interrupted copy, a full disk)"
                if size < expected
                else "the two files come from different runs, or the .idx is older than the .bin"
            )
            raise ValueError(
                f"{self._bin} has {size} bytes, but {self._idx} describes {expected}: {cause}; "
                "copy both files again or run the preprocessing again"
            )

    def _check_entries(self, max_blocks: int | None) -> None:
        lengths, offsets, bounds = (
            self.sequence_lengths,
            self.sequence_offsets,
            self.document_indices,
        )
        if not len(bounds) or bounds[0] != 0 or bounds[-1] != len(self):
            ends = f"{bounds[0]} and {bounds[-1]}" if len(bounds) else "missing"
            raise ValueError(
                f"{self._idx}: the first and last document boundary must be 0 and {len(self)} "
                f"(its number of sequences), but are {ends}; the file is damaged"
            )
        if len(self) and offsets[0] != 0:
            raise ValueError(f"{self._idx}: sequence 0 starts at byte {offsets[0]}, not 0")
        for start, stop in _blocks(len(self), max_blocks):
            if lengths[start:stop].min() < 0:
                bad = start + int(np.argmax(lengths[start:stop] < 0))
                raise ValueError(
                    f"{self._idx}: sequence {bad} has the length {lengths[bad]}; damaged file"
                )
            steps = np.diff(offsets[start : stop + 1])
            sizes = lengths[start : start + len(steps)].astype(np.int64) * self.dtype.itemsize
            if not np.array_equal(steps, sizes):
                bad = start + int(np.argmax(steps != sizes))
                raise ValueError(
                    f"{self._idx}: sequence {bad} has {lengths[bad]} tokens of "
                    f"{self.dtype.itemsize} bytes from byte {offsets[bad]} on, but the next one "
                    f"starts at byte {offsets[bad + 1]}; the file is damaged"
                )
        for start, stop in _blocks(len(bounds), max_blocks):
            steps = np.diff(bounds[start : stop + 1])
            if (steps < 0).any():
                bad = start + int(np.argmax(steps < 0))
                raise ValueError(
                    f"{self._idx}: document {bad} starts at sequence {bounds[bad]} and ends before "
                    f"it, at {bounds[bad + 1]}; the file is damaged"
                )


class IndexedDatasetWriter:
    """Writes an indexed dataset: `with IndexedDatasetWriter(prefix, dtype) as writer: ...`.

    Tokens stream to a temporary file in the same folder. Leaving the `with` block (or `close()`)
    publishes .bin, then .idx, each by a rename; leaving it by an exception removes everything.
    Memory held: 4 bytes per sequence and 8 per document.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: npt.DTypeLike) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODE_OF_DTYPE:
            raise ValueError(
                f"indexed files cannot hold {self.dtype}; they hold "
                + ", ".join(d.name for d in CODE_OF_DTYPE)
            )
        self.prefix = os.fspath(prefix)
        self._bin, self._idx = bin_path(prefix), idx_path(prefix)
        self._bin.parent.mkdir(parents=True, exist_ok=True)
        self._bin_part = Path(f"{self._bin}.partial-{os.getpid()}")
        self._idx_part = Path(f"{self._idx}.partial-{os.getpid()}")
        self._lengths, self._bounds, self._modes = array("i"), array("q", [0]), array("b")
        self._open = True
        self._stream: BinaryIO = self._bin_part.open("wb", buffering=1 << 20)

    def add_document(
        self, sequences: Sequence[npt.ArrayLike], modes: Sequence[int] | None = None
    ) -> None:
        """Append one document: its sequences, each 1-D; `modes` one per sequence.

        Raises:
            ValueError: a token does not fit the dtype.
        """
        checked = [self._checked_tokens(sequence) for sequence in sequences]
        self.add_documents(
            np.concatenate([np.empty(0, self.dtype), *checked]),
            [len(sequence) for sequence in checked],
            [len(checked)],
            modes,
        )

    def add_documents(
        self,
        tokens: npt.ArrayLike,
        sequence_lengths: npt.ArrayLike,
        sequences_per_document: npt.ArrayLike,
        modes: Sequence[int] | npt.ArrayLike | None = None,
    ) -> None:
        """Append many documents at once.

        Args:
            tokens: all tokens back to back, 1-D.
            sequence_lengths: tokens in each sequence; they sum to the number of tokens.
            sequences_per_document: they sum to the number of sequences.
            modes: one per sequence, for all documents of a file or for none.

        Raises:
            ValueError: the counts disagree, or a token does not fit the dtype.
        """
        tokens = self._checked_tokens(tokens)
        lengths = _counts(sequence_lengths, "sequence_lengths", len(tokens), "tokens")
        per_document = _counts(
            sequences_per_document, "sequences_per_document", len(lengths), "sequences"
        )
        if len(lengths) and lengths.max() > np.iinfo(np.int32).max:
            raise ValueError(
                f"a sequence of {lengths.max()} tokens: the format holds up to 2**31 - 1"
            )
        kinds = np.asarray([] if modes is None else modes, dtype="i1")
        if modes is not None and len(kinds) != len(lengths):
            raise ValueError(f"{len(kinds)} modes for {len(lengths)} sequences")
        with _naming(self._bin_part):
            self._stream.write(tokens.data)
        self._extend(lengths, np.cumsum(per_document), kinds)

    def merge(self, prefix: str | os.PathLike[str]) -> None:
        """Append all documents of another indexed dataset.

        Raises:
            ValueError: its dtype is another one.
        """
        other = IndexedDataset(prefix)
        other.verify()
        if other.dtype != self.dtype:
            raise ValueError(
                f"cannot append {bin_path(prefix)} ({other.dtype.name} tokens) to {self._bin} "
                f"({self.dtype.name} tokens): preprocess them with the same vocabulary"
            )
        with bin_path(prefix).open("rb") as source, _naming(self._bin_part):
            shutil.copyfileobj(source, self._stream, 1 << 24)
        self._extend(
            other.sequence_lengths,
            other.document_indices[1:],
            np.empty(0, "i1") if other.modes is None else other.modes,
        )

    def close(self) -> None:
        """Finish the files and publish them; a second call does nothing."""
        if not self._open:
            return
        try:
            if len(self._modes) not in (0, len(self._lengths)):
                raise ValueError(
                    f"{self._idx}: {len(self._modes)} of {len(self._lengths)} sequences have a "
                    "mode; give one for all or for none"
                )
            with _naming(self._bin_part):
                _sync(self._stream)
                self._stream.close()
            with _naming(self._idx_part), self._idx_part.open("wb") as file:
                file.writelines(self._index_parts())
                _sync(file)
            # An old index must never describe the new tokens, not even if we die between the two.
            self._idx.unlink(missing_ok=True)
            os.replace(self._bin_part, self._bin)
            os.replace(self._idx_part, self._idx)
            self._open = False
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove what was written and not published."""
        self._open = False
        with suppress(OSError):  # closing flushes again; the first error is the one to report
            self._stream.close()
        self._bin_part.unlink(missing_ok=True)
        self._idx_part.unlink(missing_ok=True)

    def __enter__(self) -> "IndexedDatasetWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def _checked_tokens(self, values: npt.ArrayLike) -> np.ndarray:
        tokens = np.ravel(np.asarray(values))
        if not tokens.size:
            return np.empty(0, self.dtype)
        if not np.can_cast(tokens.dtype, self.dtype, "safe") and self.dtype.kind in "iu":
            if tokens.dtype.kind not in "iu":
                raise ValueError(f"tokens of {self._bin} must be integers, not {tokens.dtype}")
            bounds = np.iinfo(self.dtype)
            for value in (int(tokens.min()), int(tokens.max())):
                if not bounds.min <= value <= bounds.max:
                    raise ValueError(
                        f"token id {value} does not fit {self.dtype.name} "
                        f"({bounds.min} to {bounds.max}), the dtype of {self._bin}"
                    )
        return np.ascontiguousarray(tokens, dtype=self.dtype)

    def _extend(self, lengths: np.ndarray, ends: np.ndarray, modes: np.ndarray) -> None:
        first = len(self._lengths)
        self._lengths.frombytes(lengths.astype("=i4").tobytes())
        self._bounds.frombytes((ends.astype("=i8") + first).tobytes())
        self._modes.frombytes(modes.astype("=i1").tobytes())

    def _index_parts(self) -> Iterable[bytes | memoryview]:
        lengths = np.frombuffer(self._lengths, "=i4")
        offsets = np.zeros(len(lengths), "<i8")
        np.cumsum(lengths[:-1], out=offsets[1:])
        offsets *= self.dtype.itemsize
        code = CODE_OF_DTYPE[self.dtype]
        yield _HEADER.pack(MAGIC, VERSION, code, len(lengths), len(self._bounds))
        yield lengths.astype("<i4").data
        yield offsets.data
        yield np.frombuffer(self._bounds, "=i8").astype("<i8").data
        yield np.frombuffer(self._modes, "i1").data


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    if not path.stat().st_size:  # the operating system maps no empty file
        return np.empty(0, dtype)
    return np.memmap(path, dtype, mode="r").view(np.ndarray)


def _blocks(count: int, max_blocks: int | None) -> Iterator[tuple[int, int]]:
    total = -(-count // _BLOCK)
    looked_at = total if max_blocks is None else min(total, max_blocks)
    for i in range(looked_at):
        block = i * (total - 1) // max(looked_at - 1, 1)  # the first, the last, evenly between
        yield block * _BLOCK, min(block * _BLOCK + _BLOCK, count)


def _missing_message(prefix: str, path: Path) -> str:
    message = f"{path} does not exist; a data path is the prefix of a .bin and an .idx file"
    if prefix.endswith((".bin", ".idx")):
        return f"{message}: give {prefix[:-4]}, without the ending"
    if path.suffix == ".idx" and bin_path(prefix).is_file():
        return f"{message}; its .bin is there: the run that wrote it has not finished"
    return message


def _counts(values: npt.ArrayLike, name: str, total: int, unit: str) -> np.ndarray:
    counts = np.ravel(np.asarray(values, dtype=np.int64))
    if (counts < 0).any() or counts.sum() != total:
        raise ValueError(f"{name} must be counts that sum to the {total} {unit}, not {counts}")
    return counts


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """A failed write (full disk) does not know its file: name it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
