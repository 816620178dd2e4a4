"""Output files that can be continued after a kill, and appear only when they are whole."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import zstandard

from megatron.util.files import sync, write_whole
from megatron.util.locks import Lock, LockTakenError

_PACKERS: dict[str, Callable[[], zlib._Compress | zstandard.ZstdCompressionObj]] = {
    ".gz": lambda: zlib.compressobj(6, zlib.DEFLATED, 31),  # 31: a gzip member, without a time
    ".zst": lambda: zstandard.ZstdCompressor(3).compressobj(),
}


def partial_path(path: Path) -> Path:
    """Where a file is written before it is whole."""
    return path.with_name(path.name + ".partial")


class OutputFile:
    """A file, packed as its name says, that grows from one checkpoint to the next.

    Every checkpoint ends a gzip member or zstd frame, so that the bytes up to it are whole by
    themselves; one behind the other they make one file of the format.
    """

    def __init__(self, path: Path, size: int) -> None:
        """Opens PATH.partial and cuts it to `size` bytes, those of the last checkpoint.

        Raises:
            OSError: it cannot be written, or another process is writing it.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = partial_path(path)
        try:
            self._lock = Lock(partial)
        except LockTakenError as error:
            raise OSError(f"{partial} is being written by another process") from error
        self._file: BinaryIO = partial.open("r+b")
        assert self._file.seek(0, os.SEEK_END) >= size
        self._file.truncate(size)
        self._file.seek(size)
        self._pack = _PACKERS.get(path.suffix)
        self._packer: zlib._Compress | zstandard.ZstdCompressionObj | None = None

    def write(self, data: bytes) -> None:
        """Appends lines."""
        if not data:
            return
        if self._pack is not None:
            self._packer = self._packer or self._pack()
            data = self._packer.compress(data)
        self._file.write(data)

    def checkpoint(self) -> int:
        """Brings all that was written to the disk; the size up to here, in bytes."""
        if self._packer is not None:
            self._file.write(self._packer.flush())
            self._packer = None
        sync(self._file)
        return self._file.tell()

    def close(self) -> None:
        """Closes PATH.partial; what was written after the last checkpoint does not count."""
        self._file.close()
        self._lock.release()


def publish(path: Path) -> None:
    """Gives a file its name; nothing happens where that was done before."""
    partial = partial_path(path)
    if partial.exists():
        os.replace(partial, path)


def write_packed(path: Path, data: bytes) -> None:
    """Writes a file at once, packed as its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if data and (pack := _PACKERS.get(path.suffix)):
        packer = pack()
        data = packer.compress(data) + packer.flush()
    write_whole(path, data)
