"""Cuts a stream of bytes where a record ends, in bounded memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol

BLOCK_BYTES = 1 << 20
_BLANK_LINES = re.compile(rb"\n(?:[ \t\r\f\v]*\n)+")
_BLANK_START = re.compile(rb"(?:[ \t\r\f\v]*\n)*")


@dataclass(frozen=True)
class Oversize:
    """A record longer than --max-line-bytes, of which only this is known."""

    size: int
    """Bytes."""
    lines: int
    """Lines that it takes, its end included."""


class Cutter(Protocol):
    """Finds where records end."""

    def first(self, data: bytes | bytearray) -> int:
        """One behind the end of the first record that ends in `data`; 0 where none does."""

    def last(self, data: bytes | bytearray, start: int) -> int:
        """The same for the last one; what is before `start` is known to hold no end."""

    def rest(self, data: bytes | bytearray) -> bytes:
        """The last bytes that an end may begin with, when `data` holds no end."""


class LineCutter:
    """A record is a line."""

    def first(self, data: bytes | bytearray) -> int:
        return data.find(b"\n") + 1

    def last(self, data: bytes | bytearray, start: int) -> int:
        return data.rfind(b"\n", start) + 1

    def rest(self, data: bytes | bytearray) -> bytes:
        return b""


class ParagraphCutter:
    """A record ends with an empty line, or one of white space."""

    def first(self, data: bytes | bytearray) -> int:
        match = _BLANK_LINES.search(data)
        return match.end() if match else 0

    def last(self, data: bytes | bytearray, start: int) -> int:
        end = 0
        for match in _BLANK_LINES.finditer(data, start):
            end = match.end()
        return end

    def rest(self, data: bytes | bytearray) -> bytes:
        newline = data.rfind(b"\n")
        last = bytes(data[newline:]) if newline >= 0 else b""
        return b"" if last.strip() else last

    @staticmethod
    def split(data: bytes) -> Iterator[tuple[int, bytes]]:
        """Each paragraph without the line breaks around it, and the number of those before it."""
        lines = start = 0
        ends = [match.span() for match in _BLANK_LINES.finditer(data)]
        for end, following in [*ends, (len(data), len(data))]:
            paragraph = data[start:end]
            blank = _BLANK_START.match(paragraph)  # what is left of a gap that was cut in two
            assert blank is not None
            text = paragraph[blank.end() :]
            if text.strip():
                before = paragraph.count(b"\n", 0, len(paragraph) - len(text))
                yield lines + before, text.rstrip(b"\r\n")
            lines += data.count(b"\n", start, following)
            start = following


def cut_stream(
    stream: BinaryIO, cutter: Cutter, max_bytes: int, block_bytes: int = BLOCK_BYTES
) -> Iterator[bytes | Oversize]:
    """Whole records back to back, about `block_bytes` at a time; `Oversize` for a longer one.

    A record of more than `max_bytes` is not held in memory, unless it fits a block.
    """
    kept = bytearray()
    unseen = 0  # where the part begins that may hold an end
    while data := stream.read(block_bytes):
        kept += data
        if end := cutter.last(kept, unseen):
            yield bytes(memoryview(kept)[:end])
            del kept[:end]
        unseen = len(kept) - len(cutter.rest(kept))
        if len(kept) > max_bytes:
            oversize, rest = _skip(stream, cutter, kept, block_bytes)
            yield oversize
            kept, unseen = bytearray(rest), 0
    if kept:
        yield bytes(kept)


def _skip(
    stream: BinaryIO, cutter: Cutter, begun: bytearray, block_bytes: int
) -> tuple[Oversize, bytes]:
    tail = cutter.rest(begun)
    size, lines = len(begun) - len(tail), begun.count(b"\n") - tail.count(b"\n")
    while data := stream.read(block_bytes):
        data = tail + data
        end = cutter.first(data)
        if end:
            return Oversize(size + end, lines + data.count(b"\n", 0, end)), data[end:]
        tail = cutter.rest(data)
        if len(tail) > block_bytes:  # a line break and endless blanks
            tail = tail[:1]
        size += len(data) - len(tail)
        lines += data.count(b"\n") - tail.count(b"\n")
    return Oversize(size + len(tail), lines + tail.count(b"\n")), b""
