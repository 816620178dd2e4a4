"""Records of a text file by their place in it: JSON lines, and tables in CSV or TSV.

A record is read again from its offset alone, so nothing of a file is kept in memory.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator
from functools import cached_property
from typing import BinaryIO

from megatron.data.json_lines import BadLine, texts_of_line
from megatron.data.kinds.raw_text.files import TextFile, text_files

_BOM = b"\xef\xbb\xbf"
_RANGE_BYTES = 1 << 24
LONGEST_LINE = 1 << 26
"""Bytes of a line, its end not counted; as tools/preprocess_data.py has it without
--max-line-bytes. No longer one is held in memory."""
_LONGEST_FIELD = (1 << 31) - 1

Record = tuple[int, str | BadLine]
"""Offset of a record in its file, and its text or what is wrong with it."""


class JsonLines:
    """A file with one JSON object a line; the text is the string under a key."""

    def __init__(self, file: TextFile, key: str) -> None:
        self.file, self._key = file, key

    def __reduce__(self) -> tuple[type[JsonLines], tuple[TextFile, str]]:
        return type(self), (self.file, self._key)

    def ranges(self) -> list[tuple[int, int]]:
        """Byte ranges that different processes may read; a line belongs to where it begins."""
        starts = range(0, self.file.size, _RANGE_BYTES)
        return [(start, min(start + _RANGE_BYTES, self.file.size)) for start in starts]

    def read(self, start: int, stop: int) -> Iterator[Record]:
        """The records that begin in a range of bytes, empty lines left out."""
        with open(self.file.path, "rb") as file:
            if start:
                file.seek(start - 1)
                before = file.readline(LONGEST_LINE + 2)
                if not before.endswith(b"\n"):
                    return  # all of the range is in one line, which belongs to an earlier range
                start = start - 1 + len(before)
            elif file.read(len(_BOM)) == _BOM:
                start = len(_BOM)
            file.seek(start)
            while start < stop and (line := file.readline(LONGEST_LINE + 1)):
                if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
                    yield start, BadLine(0, "longer than 64 MiB", f"{line[:40]!r}...")
                    return
                if not line.isspace():
                    yield start, self._text(line)
                start += len(line)

    def text_at(self, start: int, stop: int) -> str:
        """The text of the record at offset `start`, which ends before `stop`.

        Raises:
            ValueError: it is no longer there.
        """
        line = os.pread(self._open.fileno(), stop - start, start)
        text = self._text(line[: line.find(b"\n") + 1] or line)
        if isinstance(text, BadLine):
            raise changed(self.file, start)
        return text

    def _text(self, line: bytes) -> str | BadLine:
        texts = texts_of_line(line, 0, [self._key])
        return texts if isinstance(texts, BadLine) else texts[0]

    @cached_property
    def _open(self) -> BinaryIO:
        return open(self.file.path, "rb", buffering=0)


class Table:
    """A .csv or .tsv file whose first row names the columns; the text is what stands in one.

    Fields of a table with commas may be quoted, with line breaks in them; in one with tabs a
    quotation mark is a character like any other.
    """

    def __init__(self, file: TextFile, column: str, delim: str | None) -> None:
        self.file, self._column = file, column
        self._delim = delim or ("\t" if file.path.endswith(".tsv") else ",")
        if len(self._delim) != 1:
            raise ValueError(f"--delim {delim!r} must be one character, such as ';'")

    def __reduce__(self) -> tuple[type[Table], tuple[TextFile, str, str]]:
        return type(self), (self.file, self._column, self._delim)

    def ranges(self) -> list[tuple[int, int]]:
        """The whole file: where a row begins is known only from those before it."""
        return [(0, self.file.size)]

    def read(self, start: int, stop: int) -> Iterator[Record]:
        """All rows but the first."""
        assert (start, stop) == (0, self.file.size)
        with open(self.file.path, "rb") as file:
            rows = _Rows(file, self._delim)
            try:
                next(rows, None)
                for offset, row in rows:
                    if row:
                        yield offset, self._text(row)
            except (csv.Error, UnicodeDecodeError) as error:
                yield rows.row_start, BadLine(0, "not a row of a table", str(error))

    def text_at(self, start: int, stop: int) -> str:
        """The text of the row at offset `start`, which ends at or before `stop`.

        Raises:
            ValueError: it is no longer there.
        """
        content = os.pread(self._open.fileno(), stop - start, start)
        try:
            text = self._text(next(_Rows(io.BytesIO(content), self._delim), (0, []))[1])
        except (csv.Error, UnicodeDecodeError):
            raise changed(self.file, start) from None
        if isinstance(text, BadLine):
            raise changed(self.file, start)
        return text

    def _text(self, row: list[str]) -> str | BadLine:
        if self._place >= len(row):
            return BadLine(0, f'no column "{self._column}"', f"the row has {len(row)} columns")
        return row[self._place]

    @cached_property
    def _open(self) -> BinaryIO:
        return open(self.file.path, "rb", buffering=0)

    @cached_property
    def _place(self) -> int:
        with open(self.file.path, "rb") as file:
            try:
                names = next(_Rows(file, self._delim), (0, []))[1]
            except (csv.Error, UnicodeDecodeError) as error:
                raise ValueError(f"{self.file.path}, line 1: {error}") from None
        if self._column not in names:
            raise ValueError(
                f"--text-key {self._column}: {self.file.path} has no such column; its first row is "
                f"{', '.join(names[:8]) or 'empty'}"
            )
        return names.index(self._column)


class _Rows(Iterator[tuple[int, list[str]]]):
    """(offset, fields) of the rows of a table."""

    def __init__(self, file: BinaryIO, delim: str) -> None:
        csv.field_size_limit(_LONGEST_FIELD)  # 131,072 characters otherwise, in the whole process
        self._file, self._position, self.row_start = file, 0, 0
        self._rows = (
            csv.reader(self._lines(), delimiter=delim, quoting=csv.QUOTE_NONE)
            if delim == "\t"
            else csv.reader(self._lines(), delimiter=delim)
        )

    def __next__(self) -> tuple[int, list[str]]:
        self.row_start = self._position
        return self.row_start, next(self._rows)

    def _lines(self) -> Iterator[str]:
        for line in self._file:
            text = line.removeprefix(_BOM) if self._position == 0 else line
            self._position += len(line)
            yield text.decode("utf-8")


Records = JsonLines | Table


def text_records(path: str, text_key: str, delim: str | None) -> list[Records]:
    """The records of a file, folder or glob, file by file.

    Args:
        text_key: key or column of the text.
        delim: between the columns of a table; a comma in .csv and a tab in .tsv without it.

    Raises:
        FileNotFoundError: there is no such file.
    """
    return [
        Table(file, text_key, delim) if file.has_columns else JsonLines(file, text_key)
        for file in text_files(path)
    ]


def changed(file: TextFile, offset: int) -> ValueError:
    """What to raise when a record is not where it was."""
    return ValueError(
        f"{file.path} has changed while it was in use: there is another record at byte {offset} "
        "than when it was indexed; start the run again (its samples will be others)"
    )
