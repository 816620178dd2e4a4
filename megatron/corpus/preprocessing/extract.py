"""A block to its texts, and to the records that are none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megatron.corpus.preprocessing.blocks import Block, FileRange
from megatron.corpus.preprocessing.cutting import BLOCK_BYTES, Oversize, ParagraphCutter
from megatron.corpus.preprocessing.sources import Form
from megatron.corpus.preprocessing.unpack import BYTE_ORDER_MARK
from megatron.data.json_lines import BadLine, texts_of_line

TOO_LONG = "longer than --max-line-bytes"


@dataclass
class Texts:
    """What a block holds. Records are numbered from 1 within the block."""

    columns: list[list[str]]
    """The texts of each key, the same number of each."""
    numbers: list[int] = field(default_factory=list)
    """Of the records that the texts are from."""
    bad: list[BadLine] = field(default_factory=list)
    records: int = 0
    """How far the numbering of the source goes on."""


class Extractor:
    """Finds the texts of blocks."""

    def __init__(self, keys: Sequence[str], max_bytes: int, stop_at_bad: bool) -> None:
        """With `stop_at_bad`, what follows a malformed record is not looked at."""
        self._keys, self._max_bytes, self._stop_at_bad = keys, max_bytes, stop_at_bad

    def __call__(self, block: Block) -> Texts:
        """The texts of a block.

        Raises:
            OSError: the file cannot be read.
        """
        texts = Texts([[] for _ in self._keys])
        content = block.content
        if isinstance(content, Oversize):
            texts.bad.append(self._too_long(1, content.size))
            texts.records = content.lines
        elif isinstance(content, list):
            texts.records = len(content[0])
            self._take(texts, enumerate(zip(*content, strict=True), 1))
        elif isinstance(content, FileRange):
            data, size = read_lines(block.name, content, self._max_bytes)
            self._take_lines(texts, data)
            if size:
                texts.records += 1
                texts.bad.append(self._too_long(texts.records, size))
        elif block.form in (Form.LINES, Form.ARRAY):
            self._take_lines(texts, content)
        else:
            is_whole = block.form is Form.TEXT
            pieces = [(0, content)] if is_whole else ParagraphCutter.split(content)
            texts.records = content.count(b"\n")
            self._take(texts, self._decoded(texts, pieces))
        return texts

    def _take_lines(self, texts: Texts, data: bytes) -> None:
        lines = data.split(b"\n")
        if not lines[-1]:
            lines.pop()
        texts.records = len(lines)
        for number, line in enumerate(lines, 1):
            if not line or line.isspace():
                continue
            if len(line) > self._max_bytes:
                texts.bad.append(self._too_long(number, len(line)))
            else:
                found = texts_of_line(line, number, self._keys)
                if isinstance(found, list):
                    texts.numbers.append(number)
                    for column, text in zip(texts.columns, found, strict=True):
                        column.append(text)
                    continue
                texts.bad.append(found)
            if self._stop_at_bad:
                return

    def _take(self, texts: Texts, rows: Iterator[tuple[int, Sequence[str | None]]]) -> None:
        for number, row in rows:
            for key, text in zip(self._keys, row, strict=True):
                if text is None:
                    texts.bad.append(BadLine(number, f'"{key}" is not a string', "found null"))
                    break
                if len(text) > self._max_bytes:
                    texts.bad.append(self._too_long(number, len(text)))
                    break
            else:
                texts.numbers.append(number)
                for column, text in zip(texts.columns, row, strict=True):
                    assert text is not None
                    column.append(text)

    def _decoded(
        self, texts: Texts, pieces: Iterator[tuple[int, bytes]] | list[tuple[int, bytes]]
    ) -> Iterator[tuple[int, tuple[str]]]:
        for lines_before, piece in pieces:
            try:
                yield lines_before + 1, (piece.decode(),)
            except UnicodeDecodeError as error:
                before = piece.count(b"\n", 0, error.start)
                number = lines_before + before + 1
                texts.bad.append(BadLine(number, "not UTF-8", str(error)))

    def _too_long(self, number: int, size: int) -> BadLine:
        return BadLine(number, TOO_LONG, f"at least {size:,} bytes; up to {self._max_bytes:,} go")


def read_lines(path: str, part: FileRange, max_bytes: int) -> tuple[bytes, int]:
    """The lines that start inside a part of a plain file, whole.

    A last line of more than `max_bytes` is left out, and what was seen of its size is the second
    result, otherwise 0.
    """
    with open(path, "rb") as file:
        # A line starts at the first byte, and after each line break.
        file.seek(max(part.start - 1, 0))
        data = file.read(part.stop - max(part.start - 1, 0))
        if part.start:
            begin = data.find(b"\n") + 1
            data = data[begin:] if begin else b""
        elif data.startswith(BYTE_ORDER_MARK):
            data = data[len(BYTE_ORDER_MARK) :]
        if not data or data.endswith(b"\n"):
            return data, 0
        begin = data.rfind(b"\n") + 1
        size = len(data) - begin
        pieces = [data]
        while size <= max_bytes and (more := file.read(BLOCK_BYTES)):
            end = more.find(b"\n") + 1
            pieces.append(more[:end] if end else more)
            size += len(pieces[-1])
            if end:
                break
        if size > max_bytes + 1:
            return data[:begin], size
        return b"".join(pieces), 0
