"""Input files as blocks of whole records, the unit of work of a process.

Plain JSON lines are read by the workers themselves, a range of bytes each; all other files are read
and decompressed here, in order.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import BinaryIO

from megatron.apps.corpus.preprocessing.inputs import (
    Form,
    InputFile,
    naming_file,
    opened,
    unpacked,
)
from megatron.config import ConfigError
from megatron.data.json_lines import ArrayReader, BadLine, read_lines
from megatron.util.files import PARQUET_LIMITS, check_inflation

BLOCK_BYTES = 1 << 20
_ROWS_AT_A_TIME = 1024
_BATCH_BYTES = 1 << 26
"""Bytes of a column's texts in memory at a time, about."""
_LONG_TEXT = _BATCH_BYTES // _ROWS_AT_A_TIME
_ROW_BYTES = 64
"""Memory of a row, besides its texts."""

Content = bytes | list[str | None] | BadLine
"""A JSON record, a text in UTF-8, the strings of a row, or what makes a record unusable."""
Record = tuple[int, Content]
"""With the number of the record in its file, from 1: of its first line, its item or its row."""


@dataclass(frozen=True)
class FileRange:
    """Lines that start from byte `start` up to byte `stop` of a plain file."""

    start: int
    stop: int


@dataclass(frozen=True)
class RecordBlock:
    """Consecutive records of an input file."""

    number: int
    """Of the file among the inputs, from 0."""
    file: InputFile
    records: FileRange | list[Record]
    cursor: int
    """Where reading continues after this block: a byte of plain lines, else the last record's
    number."""
    bytes_read: int
    """Of the file on disk, up to here."""


def read_blocks(
    inputs: Sequence[InputFile],
    keys: Sequence[str],
    longest: int,
    first: int = 0,
    cursor: int = 0,
) -> Iterator[RecordBlock]:
    """All blocks from a cursor in file number `first` on; of a record of more than `longest` bytes
    only that is known. Raises ValueError if a file is damaged, or not what its name says; OSError
    if it cannot be read."""
    for number, file in enumerate(inputs[first:], first):
        if file.is_divisible:
            end = file.start + file.bytes_to_read
            for start in range(max(cursor, file.start), end, BLOCK_BYTES):
                stop = min(start + BLOCK_BYTES, end)
                yield RecordBlock(number, file, FileRange(start, stop), stop, stop - file.start)
        else:
            with opened(file.path) as stream, naming_file(file.name):
                yield from _record_blocks(number, file, stream, keys, longest, cursor)
        cursor = 0


def _record_blocks(
    number: int, file: InputFile, stream: BinaryIO, keys: Sequence[str], longest: int, cursor: int
) -> Iterator[RecordBlock]:
    batch: list[Record] = []
    size = 0

    def block() -> RecordBlock:
        position = 0 if file.path is None else min(stream.tell(), file.size)
        return RecordBlock(number, file, batch, batch[-1][0], position)

    for record in _records(file, stream, keys, longest, cursor):
        if record[0] <= cursor:
            continue
        batch.append(record)
        content = record[1]
        size += _ROW_BYTES
        if isinstance(content, list):
            size += sum(len(text) for text in content if text is not None)
        elif isinstance(content, bytes):
            size += len(content)
        if size >= BLOCK_BYTES:
            yield block()
            batch, size = [], 0
    if batch:
        yield block()


def _records(
    file: InputFile, stream: BinaryIO, keys: Sequence[str], longest: int, done: int
) -> Iterator[Record]:
    if file.form is Form.PARQUET:
        return _rows(stream, file.name, keys, done)
    text = unpacked(stream)
    if file.form is Form.ARRAY:
        return _items(text, file.name, longest)
    if file.form is Form.TEXT:
        return iter([(1, _unless_long(text.read(longest + 1), 1, longest))])
    lines = enumerate((line for _, line in read_lines(text, longest)), 1)
    if file.form is Form.PARAGRAPHS:
        return _paragraphs(lines, longest)
    return ((n, _unless_long(line, n, longest)) for n, line in lines if line.strip())


def _unless_long(content: bytes, number: int, longest: int) -> bytes | BadLine:
    return content if len(content) <= longest else too_long(number, longest)


def too_long(number: int, longest: int) -> BadLine:
    """A record of more than --max-line-bytes."""
    return BadLine(number, "longer than --max-line-bytes", f"more than {longest:,} bytes")


def _items(text: io.BufferedReader, name: str, longest: int) -> Iterator[Record]:
    try:
        yield from enumerate(ArrayReader(text, longest), 1)
    except ValueError as error:
        raise ValueError(f"--input {name}, {error}") from None


def _paragraphs(lines: Iterator[tuple[int, bytes]], longest: int) -> Iterator[Record]:
    """What is between empty lines, or lines of white space, with the number of its first line."""
    first, size = 0, 0
    found: list[bytes] = []
    for number, line in lines:
        if not line or line.isspace():
            if found:
                yield first, _unless_long(b"\n".join(found).rstrip(b"\r"), first, longest)
            found, size = [], 0
            continue
        if not found:
            first = number
        if size <= longest:  # enough of a longer one to tell that it is
            found.append(line)
            size += len(line) + 1
    if found:
        yield first, _unless_long(b"\n".join(found).rstrip(b"\r"), first, longest)


def _rows(file: BinaryIO, name: str, columns: Sequence[str], done: int) -> Iterator[Record]:
    """The rows of a Parquet file; row groups with no row after number `done` are not read."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(
            f"--input {name} is a Parquet file: reading it needs the package pyarrow "
            "(pip install pyarrow)"
        ) from error
    try:
        table = parquet.ParquetFile(file, **PARQUET_LIMITS)
        _check_columns(table.schema_arrow, name, columns)
        shared = parquet.ParquetFile(
            file, metadata=table.metadata, read_dictionary=columns, **PARQUET_LIMITS
        )
        number = 1
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            if number + rows - 1 <= done:
                number += rows
                continue
            for row in _rows_of_group(table, shared, group, name, columns):
                yield number, row
                number += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--input {name} is damaged or not a Parquet file: {error}") from error


def _rows_of_group(  # type: ignore[no-untyped-def]
    table, shared, group: int, name: str, columns: Sequence[str]
) -> Iterator[list[str | None]]:
    """``shared`` reads the same file, each text of a dictionary once. Raises ValueError if a few
    bytes stand for too much."""
    where = f"--input {name}, row group {group + 1}:"
    chunks = table.metadata.row_group(group)
    ours = [c for c in map(chunks.column, range(chunks.num_columns)) if c.path_in_schema in columns]
    for chunk in ours:
        column = f"{where} column {chunk.path_in_schema!r}"
        check_inflation(chunk.total_compressed_size, chunk.total_uncompressed_size, column)
    packed = sum(chunk.total_compressed_size for chunk in ours)
    largest = max(chunk.total_uncompressed_size for chunk in ours)
    at_a_time = min(_ROWS_AT_A_TIME, _ROWS_AT_A_TIME * _BATCH_BYTES // max(largest, 1))
    if largest > _LONG_TEXT:
        at_a_time = min(at_a_time, _BATCH_BYTES // _longest_shared(shared, group, columns))
    at_a_time = max(at_a_time, 1)
    long_texts = 0
    for batch in table.iter_batches(at_a_time, [group], columns):
        texts = [batch.column(column).to_pylist() for column in columns]
        if at_a_time < _ROWS_AT_A_TIME:
            lengths = (len(text) for column in texts for text in column if text is not None)
            long_texts += sum(length for length in lengths if length > _LONG_TEXT)
            check_inflation(packed, long_texts, where)
        yield from map(list, zip(*texts, strict=True))


def _longest_shared(shared, group: int, columns: Sequence[str]) -> int:  # type: ignore[no-untyped-def]
    """Bytes of the longest text of the dictionaries of a row group: it is in the file once, and may
    be that of every row."""
    from pyarrow import compute

    longest = 1
    for batch in islice(shared.iter_batches(1, [group], columns), 1):
        for column in batch.columns:
            lengths = compute.binary_length(column.dictionary)
            longest = max(longest, compute.max(lengths).as_py() or 1)
    return longest


def _check_columns(schema, name: str, columns: Sequence[str]) -> None:  # type: ignore[no-untyped-def]
    from pyarrow import types

    try:
        names = schema.names
    except UnicodeDecodeError as error:
        raise ValueError(f"--input {name}: a column's name is not UTF-8: {error}") from None
    for column in columns:
        if column not in names:
            raise ValueError(
                f"--input {name} has no column {column!r} (--json-keys); its columns: "
                + ", ".join(names)
            )
        kind = schema.field(column).type
        if types.is_dictionary(kind):
            kind = kind.value_type
        if not (types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind)):
            raise ValueError(
                f"--input {name}: column {column!r} (--json-keys) contains {kind}, not strings"
            )
