"""The `.idx` of an indexed dataset: memory-mapped, and refused when it is damaged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron.data.indexed.format import DTYPE_OF_CODE, HEADER, MAGIC, VERSION
from megatron.util.digests import digest_of_parts

# Opening looks at up to this many blocks of entries, evenly spaced: all of them below 16 million.
_BLOCK = 1 << 18
_BLOCKS_AT_OPENING = 64


class IndexFile:
    """Lengths, offsets and document boundaries of the sequences of a `.bin`.

    Opening a huge file looks at a part of its entries; `verify` looks at all of them.

    Args:
        path: the file.
        name: what messages call it; its path, unless it is a copy of something elsewhere.

    Raises:
        ValueError: the file is damaged or cut short; the message names it.
    """

    dtype: np.dtype
    """Of the tokens."""
    sequence_lengths: npt.NDArray[np.int32]
    """Tokens in each sequence, int32[n]."""
    sequence_offsets: npt.NDArray[np.int64]
    """Byte offset of each sequence in the .bin, int64[n]."""
    document_indices: npt.NDArray[np.int64]
    """Document d holds the sequences document_indices[d] up to document_indices[d + 1]."""
    modes: npt.NDArray[np.int8] | None
    """Mode of each sequence, int8[n]; None when the file has none (text)."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.name = name or str(path)
        self._map(path)
        self._check_entries(_BLOCKS_AT_OPENING)

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.sequence_lengths)

    @property
    def bin_bytes(self) -> int:
        """Size that the .bin must have."""
        if not len(self):
            return 0
        return int(self.sequence_offsets[-1]) + self.bytes_of(len(self) - 1)

    def bytes_of(self, sequence: int) -> int:
        """Size of a sequence in the .bin."""
        return int(self.sequence_lengths[sequence]) * self.dtype.itemsize

    def lengths_digest(self) -> str:
        """Identifies the sequence lengths, wherever the files lie: equal when those are equal."""
        return digest_of_lengths(self.sequence_lengths)

    def check_bin_size(self, name: str, size: int) -> None:
        """Compare the size of a .bin with what this describes.

        Raises:
            ValueError: naming both files, both sizes and the likely cause.
        """
        if size != self.bin_bytes:
            cause = (
                "the .bin was cut short (an interrupted copy, a full disk)"
                if size < self.bin_bytes
                else "the two files come from different runs, or the .idx is older than the .bin"
            )
            raise ValueError(
                f"{name} has {size} bytes, but {self.name} describes {self.bin_bytes}: {cause}; "
                "copy both files again or run the preprocessing again"
            )

    def check_sequence(self, sequence: int) -> None:
        """Check the entries of one sequence, which opening may not have looked at.

        Raises:
            ValueError: naming the file and the sequence.
        """
        start = int(self.sequence_offsets[sequence])
        last = sequence + 1 == len(self)
        stop = self.bin_bytes if last else int(self.sequence_offsets[sequence + 1])
        if start < 0 or stop - start != self.bytes_of(sequence):
            raise self._wrong_offset(sequence, stop)

    def verify(self) -> None:
        """Check every entry.

        Raises:
            ValueError: naming the file and the first bad sequence or document.
        """
        self._check_entries(None)

    def _map(self, path: Path) -> None:
        size = path.stat().st_size
        if size < HEADER.size:
            raise ValueError(
                f"{self.name} has {size} bytes, less than the {HEADER.size} of its header: "
                "the copy or the preprocessing that wrote it was cut short"
            )
        raw = map_file(path, np.dtype("u1"))
        magic, version, code, sequences, boundaries = HEADER.unpack(raw[: HEADER.size].tobytes())
        if magic != MAGIC:
            raise ValueError(
                f"{self.name} starts with {magic!r}, not {MAGIC!r}: it is no Megatron index "
                "(mmap) file"
            )
        if version != VERSION:
            raise ValueError(f"{self.name} has format version {version}; only {VERSION} is known")
        if code not in DTYPE_OF_CODE:
            raise ValueError(
                f"{self.name} has dtype code {code}; known are "
                + ", ".join(f"{c} ({d.name})" for c, d in DTYPE_OF_CODE.items())
            )
        expected = HEADER.size + 12 * sequences + 8 * boundaries
        if size not in (expected, expected + sequences):
            raise ValueError(
                f"{self.name} has {size} bytes, but its header ({sequences} sequences, "
                f"{boundaries} document boundaries) makes {expected}: "
                + ("it was cut short" if size < expected else "something was appended to it")
            )
        self.dtype = DTYPE_OF_CODE[code]
        lengths_end = HEADER.size + 4 * sequences
        offsets_end = lengths_end + 8 * sequences
        self.sequence_lengths = raw[HEADER.size : lengths_end].view("<i4")
        self.sequence_offsets = raw[lengths_end:offsets_end].view("<i8")
        self.document_indices = raw[offsets_end:expected].view("<i8")
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
                    f"{self.name}: sequence {bad} has the length {lengths[bad]}; damaged file"
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


def digest_of_lengths(lengths: np.ndarray) -> str:
    """Equal for equal lengths, int32[n]."""
    blocks = (lengths[start : start + _BLOCK] for start in range(0, len(lengths), _BLOCK))
    return digest_of_parts(np.ascontiguousarray(block).data for block in blocks)


def map_file(path: Path, dtype: np.dtype) -> np.ndarray:
    """A whole file as a read-only array."""
    if not path.stat().st_size:  # the operating system maps no empty file
        return np.empty(0, dtype)
    return np.memmap(path, dtype, mode="r").view(np.ndarray)


def _blocks(count: int, max_blocks: int | None) -> Iterator[tuple[int, int]]:
    total = -(-count // _BLOCK)
    looked_at = total if max_blocks is None else min(total, max_blocks)
    for i in range(looked_at):
        block = i * (total - 1) // max(looked_at - 1, 1)  # the first, the last, evenly between
        yield block * _BLOCK, min(block * _BLOCK + _BLOCK, count)
