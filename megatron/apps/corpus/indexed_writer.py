"""Writer of indexed datasets."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, BinaryIO

import numpy as np
import numpy.typing as npt

from megatron.data.indexed import (
    CODE_OF_DTYPE,
    HEADER,
    MAGIC,
    VERSION,
    IndexedDataset,
    bin_path,
    idx_path,
    mark_path,
)
from megatron.util.files import naming, sync, sync_path
from megatron.util.progress import progress_bar

# Maximum number of entries or tokens in memory at a time.
_BLOCK = 1 << 20


class IndexedDatasetWriter:
    """Writer of an indexed dataset: `with IndexedDatasetWriter(prefix, dtype) as writer: ...`.

    Everything is streamed to temporary files in the same folder, so that memory use is constant.
    Leaving the `with` block (or `close()`) renames the .bin, then the .idx, to their final names;
    an exception removes all temporary files.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        dtype: npt.DTypeLike,
        mark: bytes | None = None,
    ) -> None:
        """``mark`` is the content of the tokenizer's mark file. None if it is not known."""
        self.mark = mark
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODE_OF_DTYPE:
            raise ValueError(
                f"indexed files cannot store {self.dtype}; they store "
                + ", ".join(d.name for d in CODE_OF_DTYPE)
            )
        self.prefix = os.fspath(prefix)
        self._bin, self._idx = bin_path(prefix), idx_path(prefix)
        folder = self._bin.parent
        folder.mkdir(parents=True, exist_ok=True)
        self._bin_part = Path(f"{self._bin}.partial-{os.getpid()}")
        self._idx_part = Path(f"{self._idx}.partial-{os.getpid()}")
        self._lengths, self._bounds, self._modes = (
            # Unnamed, so that the file disappears if the process dies.
            Spool(tempfile.TemporaryFile(dir=folder, buffering=1 << 16), dtype, self._idx_part)  # noqa: SIM115
            for dtype in ("<i4", "<i8", "i1")
        )
        self._bounds.append(np.zeros(1, "<i8"))
        self._open = True
        self._stream: BinaryIO = self._bin_part.open("wb", buffering=1 << 20)

    def add_document(
        self, sequences: Sequence[npt.ArrayLike], modes: Sequence[int] | None = None
    ) -> None:
        """Append one document: 1-D sequences, and optionally a mode for each. Raises ValueError if
        a token does not fit the dtype."""
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
        """Append many documents at once, given their concatenated tokens. `modes` has one entry per
        sequence; all documents of a file or none must have modes. Raises ValueError if a token does
        not fit the dtype, or if counts disagree."""
        tokens = self._checked_tokens(tokens)
        lengths = _counts(sequence_lengths, "sequence_lengths", len(tokens), "tokens")
        per_document = _counts(
            sequences_per_document, "sequences_per_document", len(lengths), "sequences"
        )
        if len(lengths) and lengths.max() > np.iinfo(np.int32).max:
            raise ValueError(
                f"a sequence of {lengths.max()} tokens: the format allows up to 2**31 - 1"
            )
        kinds = np.asarray([] if modes is None else modes, dtype="i1")
        if modes is not None and len(kinds) != len(lengths):
            raise ValueError(f"{len(kinds)} modes for {len(lengths)} sequences")
        with naming(self._bin_part):
            self._stream.write(tokens.data)
        self._bounds.append(np.cumsum(per_document) + self._lengths.count)
        self._lengths.append(lengths)
        self._modes.append(kinds)

    def merge(self, prefix: str | os.PathLike[str], *, widen: bool = False) -> None:
        """Append all documents of another indexed dataset. `widen` also accepts a narrower dtype,
        such as uint16 into int32. Raises ValueError if the dtype differs otherwise, or if the
        dataset is damaged."""
        other = IndexedDataset(prefix)
        other.verify()
        if other.dtype != self.dtype and not (
            widen and np.can_cast(other.dtype, self.dtype, "safe")
        ):
            raise ValueError(
                f"cannot append {bin_path(prefix)} ({other.dtype.name} tokens) to {self._bin} "
                f"({self.dtype.name} tokens): preprocess them with the same vocabulary"
            )
        # Read the file instead of mapping it: mapped pages would count as memory of this process.
        path = bin_path(prefix)
        bar = progress_bar(f"appending {path}", total=path.stat().st_size)
        with bar, path.open("rb") as source:
            while block := source.read(_BLOCK * other.dtype.itemsize):
                tokens = np.frombuffer(block, other.dtype).astype(self.dtype, copy=False)
                with naming(self._bin_part):
                    self._stream.write(tokens.data)
                bar.update(len(block))
        first = self._lengths.count
        for bounds in _blocks(other.document_indices[1:]):
            self._bounds.append(bounds + first)
        for lengths in _blocks(other.sequence_lengths):
            self._lengths.append(lengths)
        if other.modes is not None:
            for modes in _blocks(other.modes):
                self._modes.append(modes)

    def close(self) -> None:
        """Finish the files and rename them to their final names. A second call does nothing."""
        if not self._open:
            return
        try:
            if self._modes.count not in (0, self._lengths.count):
                raise ValueError(
                    f"{self._idx}: {self._modes.count} of {self._lengths.count} sequences have a "
                    "mode; give one for all or for none"
                )
            with naming(self._bin_part):
                sync(self._stream)
                self._stream.close()
            with naming(self._idx_part), self._idx_part.open("wb") as file:
                parts = index_parts(self.dtype, self._lengths, self._bounds, self._modes)
                file.writelines(parts)
                sync(file)
            publish(self._bin_part, self._idx_part, self.prefix, self.mark)
            self._open = False
        finally:
            self.discard()

    def discard(self) -> None:
        """Close and remove the temporary files."""
        self._open = False
        for file in (self._stream, self._lengths, self._bounds, self._modes):
            # closing flushes again; only the first error should be reported
            with suppress(OSError):
                file.close()
        self._bin_part.unlink(missing_ok=True)
        self._idx_part.unlink(missing_ok=True)

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
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


def publish(new_bin: Path, new_idx: Path, prefix: str, mark: bytes | None = None) -> None:
    """Rename two complete files to those of the dataset `prefix`, and write its tokenizer mark next
    to them. Completes an interrupted call; does nothing if `new_idx` does not exist."""
    if not new_idx.exists():
        return
    if new_bin.exists():
        # An old index must never describe new tokens, even if a kill separates the renames.
        idx_path(prefix).unlink(missing_ok=True)
        os.replace(new_bin, bin_path(prefix))
    if mark is None:
        mark_path(prefix).unlink(missing_ok=True)
    else:
        part = mark_path(new_idx)
        part.write_bytes(mark)
        sync_path(part)
        os.replace(part, mark_path(prefix))
    os.replace(new_idx, idx_path(prefix))


class Spool:
    """Long array in a file, to which values are appended."""

    def __init__(self, file: IO[bytes], dtype: str, path: Path, count: int = 0) -> None:
        """`file`, open to append and read, contains `count` values. `path` is shown in errors."""
        self.file, self.count = file, count
        self._dtype, self._path = np.dtype(dtype), path

    def append(self, values: np.ndarray) -> None:
        with naming(self._path):
            self.file.write(np.ascontiguousarray(values, self._dtype).data)
        self.count += len(values)

    def blocks(self) -> Iterator[np.ndarray]:
        self.file.seek(0)
        while block := self.file.read(_BLOCK * self._dtype.itemsize):
            yield np.frombuffer(block, self._dtype)

    def close(self) -> None:
        self.file.close()


def index_parts(
    dtype: np.dtype, lengths: Spool, bounds: Spool, modes: Spool | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the content of an .idx in pieces. `dtype` is the tokens' dtype, little-endian. `bounds`
    contains the number of sequences before each document and after the last, int64."""
    yield HEADER.pack(MAGIC, VERSION, CODE_OF_DTYPE[dtype], lengths.count, bounds.count)
    yield from (block.data for block in lengths.blocks())
    end = 0
    for block in lengths.blocks():
        ends = end + np.cumsum(block, dtype="<i8")
        yield ((ends - block) * dtype.itemsize).data
        end = int(ends[-1])
    yield from (block.data for block in bounds.blocks())
    if modes is not None:
        yield from (block.data for block in modes.blocks())


def _blocks(values: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(values), _BLOCK):
        yield values[start : start + _BLOCK]


def _counts(values: npt.ArrayLike, name: str, total: int, unit: str) -> np.ndarray:
    counts = np.ravel(np.asarray(values, dtype=np.int64))
    if (counts < 0).any() or counts.sum() != total:
        raise ValueError(f"{name} must be counts that sum to {total} {unit}, not {counts}")
    return counts
