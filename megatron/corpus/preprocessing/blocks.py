"""Sources as blocks of whole records: what a worker gets at a time.

What can be read from anywhere is read by the workers themselves; the rest is read and unpacked
here, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

from megatron.corpus.preprocessing.cutting import (
    BLOCK_BYTES,
    LineCutter,
    Oversize,
    ParagraphCutter,
    cut_stream,
)
from megatron.corpus.preprocessing.json_array import ArrayReader
from megatron.corpus.preprocessing.parquet import Rows, read_rows
from megatron.corpus.preprocessing.sources import Form, Source
from megatron.corpus.preprocessing.unpack import naming_file, opened, unpacked

_Found = Iterator[tuple[bytes | Oversize | Rows, int, float]]
"""Content of a block, the cursor behind it, and the share of the source that is then read."""


@dataclass(frozen=True)
class FileRange:
    """Lines that start from byte `start` up to byte `stop` of a plain file."""

    start: int
    stop: int


@dataclass(frozen=True)
class Block:
    """Consecutive records of a source."""

    source: int
    """Its number."""
    form: Form
    name: str
    content: FileRange | bytes | Oversize | Rows
    cursor: int
    """Where the source is read on after this block: bytes of a plain or unpacked file, items of an
    array, rows of a Parquet file."""
    bytes_read: int
    """Of the source on disk, up to here."""


@dataclass(frozen=True)
class BlockReader:
    """Cuts sources into blocks."""

    sources: Sequence[Source]
    keys: Sequence[str]
    max_line_bytes: int
    block_bytes: int = field(default=BLOCK_BYTES)

    def read(self, source: int = 0, cursor: int = 0) -> Iterator[Block]:
        """All blocks from a place on, as a `Block` before it has given it.

        Raises:
            ValueError: a file is damaged or no such file as its name says; names the file.
            OSError: it cannot be read.
        """
        for number in range(source, len(self.sources)):
            yield from self._read_source(number, cursor)
            cursor = 0

    def _read_source(self, number: int, cursor: int) -> Iterator[Block]:
        source = self.sources[number]
        if source.is_divisible:
            yield from self._ranges(number, max(cursor, source.start))
            return
        with opened(source.path) as file, naming_file(source.name):
            if source.form is Form.PARQUET:
                found: _Found = read_rows(file, source.name, self.keys, cursor, self.block_bytes)
            else:
                stream = unpacked(file)
                found = _READERS[source.form](self, source, stream, cursor, _share(source, file))
            for content, end, share in found:
                bytes_read = round(share * source.size)
                yield Block(number, source.form, source.name, content, end, bytes_read)

    def _ranges(self, number: int, start: int) -> Iterator[Block]:
        source = self.sources[number]
        end = source.size if source.stop is None else source.stop
        while start < end:
            stop = min(start + self.block_bytes, end)
            content = FileRange(start, stop)
            yield Block(number, source.form, source.name, content, stop, stop - source.start)
            start = stop

    def _records(
        self, source: Source, stream: BinaryIO, cursor: int, share: Callable[[], float]
    ) -> _Found:
        """Of lines and of paragraphs."""
        at = cursor
        while cursor:
            skipped = len(stream.read(min(cursor, self.block_bytes)))
            if not skipped:
                raise EOFError(f"it ends before byte {at}, up to which it was read before")
            cursor -= skipped
        cutter = LineCutter() if source.form is Form.LINES else ParagraphCutter()
        for content in cut_stream(stream, cutter, self.max_line_bytes, self.block_bytes):
            at += content.size if isinstance(content, Oversize) else len(content)
            yield content, at, share()

    def _items(
        self, source: Source, stream: BinaryIO, cursor: int, share: Callable[[], float]
    ) -> _Found:
        at, size = 0, 0
        items: list[bytes] = []
        for item in ArrayReader(stream, source.name, self.max_line_bytes):
            at += 1
            if at <= cursor:
                continue
            items.append(item)
            size += len(item)
            if size >= self.block_bytes:
                yield b"\n".join(items), at, share()
                items, size = [], 0
        if items:
            yield b"\n".join(items), at, share()

    def _text(
        self, source: Source, stream: BinaryIO, cursor: int, share: Callable[[], float]
    ) -> _Found:
        if cursor:
            return
        content = stream.read(self.max_line_bytes + 1)
        if len(content) > self.max_line_bytes:
            size = len(content)
            while more := stream.read(self.block_bytes):
                size += len(more)
            yield Oversize(size, 0), 1, 1.0
        else:
            yield content, 1, 1.0


_READERS = {
    Form.LINES: BlockReader._records,
    Form.PARAGRAPHS: BlockReader._records,
    Form.ARRAY: BlockReader._items,
    Form.TEXT: BlockReader._text,
}


def _share(source: Source, file: BinaryIO) -> Callable[[], float]:
    if source.path is None or not source.size:
        return lambda: 1.0
    return lambda: file.tell() / source.size
