"""Files as streams of bytes: gzip, zstd or neither, told by their first bytes."""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import zstandard

BUFFER = 1 << 20
_PACKED_BYTES = 1 << 10
"""Of a zstd file at a time: they unpack to 32 MiB at most."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UNPACKING_ERRORS = (gzip.BadGzipFile, zlib.error, zstandard.ZstdError, EOFError)


@contextmanager
def opened(path: Path | None) -> Iterator[BinaryIO]:
    """A file to read; None is the standard input."""
    if path is None:
        yield sys.stdin.buffer
    else:
        with path.open("rb") as file:
            yield file


def is_packed(head: bytes) -> bool:
    """Whether the first bytes of a file are those of gzip or zstd."""
    return _is_gzip(head) or _is_zstd(head)


def unpacked(file: BinaryIO) -> io.BufferedReader:
    """The content, by the file's first bytes, not its name; a byte-order mark is left out.

    Reading raises what `naming_file` turns into a ValueError.
    """
    assert isinstance(file, io.BufferedReader)
    head = file.peek(4)[:4]
    stream = file
    if _is_gzip(head):
        packed: io.BufferedIOBase = gzip.GzipFile(fileobj=file)
        stream = io.BufferedReader(packed, BUFFER)  # type: ignore[arg-type,type-var]
    elif _is_zstd(head):
        stream = io.BufferedReader(_ZstdStream(file), BUFFER)
    if stream.peek(3)[:3] == BYTE_ORDER_MARK:
        stream.read(3)
    return stream


@contextmanager
def naming_file(name: object) -> Iterator[None]:
    """The errors of unpacking do not know their file: name it.

    Raises:
        ValueError: the file is damaged or cut short.
    """
    try:
        yield
    except _UNPACKING_ERRORS as error:
        raise ValueError(f"--input {name} is damaged or cut short: {error}") from error


def _is_gzip(head: bytes) -> bool:
    return head[:2] == b"\x1f\x8b"


def _is_zstd(head: bytes) -> bool:
    is_skippable_frame = head[1:4] == b"\x2a\x4d\x18" and head[:1] >= b"\x50"
    return head[:4] == b"\x28\xb5\x2f\xfd" or is_skippable_frame


class _ZstdStream(io.RawIOBase):
    """Unpacked zstd frames. zstandard's own reader takes a file cut short for a whole one."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._frame = self._decompressor.decompressobj()
        self._is_between_frames = True
        self._packed = self._unpacked = b""
        self._taken = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def,override]
        while self._taken == len(self._unpacked):
            self._packed = self._packed or self._file.read(_PACKED_BYTES)
            if not self._packed:
                if not self._is_between_frames:
                    raise EOFError("the file ends inside a zstd frame")
                return 0
            if self._frame.eof:
                self._frame = self._decompressor.decompressobj()
            self._unpacked, self._taken = self._frame.decompress(self._packed), 0
            self._is_between_frames = self._frame.eof
            self._packed = self._frame.unused_data if self._frame.eof else b""
        count = min(len(buffer), len(self._unpacked) - self._taken)
        buffer[:count] = memoryview(self._unpacked)[self._taken : self._taken + count]
        self._taken += count
        return count
