"""Input files as blocks of whole records, the unit of work of a process, and the encoding of
blocks.

Workers read plain JSON lines themselves, each a range of bytes. All other files are read and
decompressed in the main process, in order.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from megatron.apps.corpus.preprocessing.inputs import Form, InputFile, naming_file, opened, unpacked
from megatron.config import ConfigError
from megatron.features.raw_text.encoder import TextEncoder, TextSettings, refused
from megatron.features.raw_text.records import ArrayReader, BadLine, read_lines, texts_of_line
from megatron.tokenizer.mark import mark_of
from megatron.util.files import PARQUET_LIMITS, check_inflation

BLOCK_BYTES = 1 << 20
_ROWS_AT_A_TIME = 1024
_BATCH_BYTES = 1 << 26  # approximate bytes of a column's texts that are in memory at a time
_LONG_TEXT = _BATCH_BYTES // _ROWS_AT_A_TIME
_ROW_BYTES = 64  # estimated memory of a row, without its texts

Content = bytes | list[str | None] | BadLine
"""A JSON record, a text in UTF-8, the strings of a row, or the reason why a record is malformed."""
Record = tuple[int, Content]
"""A record's number and content. The number, from 1, is its first line, its item in a JSON array,
or its row in a Parquet file."""


@dataclass(frozen=True)
class FileRange:
    """Lines of an uncompressed file that begin at or after byte `start` and before byte `stop`."""

    start: int
    stop: int


@dataclass(frozen=True)
class RecordBlock:
    """Consecutive records of an input file."""

    number: int  # index of the file among the inputs
    file: InputFile
    records: FileRange | list[Record]
    cursor: int
    """Position from which to read on after this block: a byte offset for plain lines, otherwise the
    number of the last record."""
    bytes_read: int  # number of the file's bytes on disk read so far


def read_blocks(
    inputs: Sequence[InputFile],
    keys: Sequence[str],
    longest: int,
    first: int = 0,
    cursor: int = 0,
) -> Iterator[RecordBlock]:
    """Yield all blocks, starting at position `cursor` of file number `first`. A record longer than
    `longest` bytes becomes a `BadLine`. Raises ValueError if a file is damaged or its format
    differs from its name, and OSError if it cannot be read."""
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
    return BadLine(number, "longer than --max-line-bytes", f"more than {longest:,} bytes")


def _items(text: io.BufferedReader, name: str, longest: int) -> Iterator[Record]:
    try:
        yield from enumerate(ArrayReader(text, longest), 1)
    except ValueError as error:
        raise ValueError(f"--input {name}, {error}") from None


def _paragraphs(lines: Iterator[tuple[int, bytes]], longest: int) -> Iterator[Record]:
    """Yield each paragraph, the text between blank lines, with the number of its first line."""
    first, size = 0, 0
    paragraph: list[bytes] = []
    for number, line in chain(lines, [(0, b"")]):
        if not line or line.isspace():
            if paragraph:
                yield first, _unless_long(b"\n".join(paragraph).rstrip(b"\r"), first, longest)
            paragraph, size = [], 0
            continue
        if not paragraph:
            first = number
        if size <= longest:  # once the paragraph is too long, its remaining lines are not needed
            paragraph.append(line)
            size += len(line) + 1


def _rows(file: BinaryIO, name: str, columns: Sequence[str], done: int) -> Iterator[Record]:
    """Yield the rows of a Parquet file after row `done`, without reading earlier row groups."""
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
    """Yield the rows of a row group. ``shared`` is the same file, read with dictionaries, in which
    each distinct text occurs once. Raises ValueError if texts are implausibly large for their
    compressed size."""
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
    """Return the size in bytes of the longest text in a row group's dictionaries. A dictionary
    stores the text once, but every row may contain it."""
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


_RANGE_BUFFER_BYTES = 1 << 17


@dataclass(frozen=True)
class EncodeConfig:
    """Settings that determine how a record is tokenized."""

    text: TextSettings
    keys: tuple[str, ...]
    stop_at_bad_line: bool
    max_line_bytes: int


@dataclass(frozen=True)
class EncodedTexts:
    tokens: npt.NDArray[np.integer]  # all documents concatenated
    sequence_lengths: npt.NDArray[np.int32]
    sequences_per_document: npt.NDArray[np.int32]
    text_bytes: int  # UTF-8 bytes of the texts
    empty: int  # number of texts without tokens, which do not become documents


@dataclass(frozen=True)
class EncodedBlock:
    texts: list[EncodedTexts]  # one for each key
    bad_lines: list[BadLine]  # numbered within the file, or within a range of bytes
    lines: int  # number of lines in a range of bytes; 0 for other blocks


class BlockEncoder:
    """Encoder of blocks. Equal records give equal tokens in all processes and blocks."""

    def __init__(self, config: EncodeConfig) -> None:
        """Build the tokenizer and sentence splitter. Raises the errors of `build_tokenizer`,
        `TextEncoder.eod` and `build_splitter`."""
        self.config = config
        self._encode = TextEncoder(config.text)
        self.dtype = self._encode.dtype
        mark = mark_of(self._encode.tokenizer, config.text.tokenizer.tokenizer_type)
        self.mark = None if mark is None else mark.json()
        assert self._encode.eod is None or self._encode.eod.size == 1
        assert self._encode.split is None or config.text.splitter

    def __call__(self, block: RecordBlock) -> EncodedBlock:
        """Encode a block. Raises OSError if a range of bytes cannot be read."""
        numbers: list[int] = []
        columns: list[list[str]] = [[] for _ in self.config.keys]
        bad: list[BadLine] = []
        lines = 0
        for number, content in self._records(block):
            lines = number
            result = self._texts(number, content, block.file.form)
            if isinstance(result, list):
                numbers.append(number)
                for column, text in zip(columns, result, strict=True):
                    column.append(text)
            elif result is not None:
                bad.append(result)
                if self.config.stop_at_bad_line:
                    break
        try:
            texts = [self._encoded(column) for column in columns]
        except ValueError:  # find the text that cannot be tokenized
            refusals: dict[int, BadLine] = {}
            for column in columns:
                for place, error in refused(self._encode, column):
                    line = BadLine(numbers[place], "a text that cannot be tokenized", str(error))
                    refusals.setdefault(place, line)
            bad = sorted([*bad, *refusals.values()], key=lambda line: line.number)
            texts = [
                self._encoded([t for place, t in enumerate(column) if place not in refusals])
                for column in columns
            ]
        return EncodedBlock(texts, bad, lines if isinstance(block.records, FileRange) else 0)

    def _records(self, block: RecordBlock) -> Iterator[Record]:
        """Yield the records of a block. The lines of a byte range are numbered within the range."""
        if not isinstance(block.records, FileRange):
            yield from block.records
            return
        span, longest = block.records, self.config.max_line_bytes
        assert block.file.path is not None
        with block.file.path.open("rb", _RANGE_BUFFER_BYTES) as file:
            lines = read_lines(file, longest, span.start, span.stop)
            for number, (_, line) in enumerate(lines, 1):
                yield number, line if len(line) <= longest else too_long(number, longest)

    def _texts(
        self, number: int, content: bytes | list[str | None] | BadLine, form: Form
    ) -> list[str] | BadLine | None:
        if isinstance(content, BadLine):
            return content
        if isinstance(content, list):
            texts = []
            for key, text in zip(self.config.keys, content, strict=True):
                if text is None:
                    return BadLine(number, f'"{key}" is not a string', "found null")
                if len(text) > self.config.max_line_bytes:
                    return too_long(number, self.config.max_line_bytes)
                texts.append(text)
            return texts
        if form in (Form.TEXT, Form.PARAGRAPHS):
            try:
                return [content.decode()]
            except UnicodeDecodeError as error:
                line = number + content.count(b"\n", 0, error.start)
                return BadLine(line, "not UTF-8", str(error))
        if not content or content.isspace():
            return None
        return texts_of_line(content, number, self.config.keys)

    def _encoded(self, texts: Sequence[str]) -> EncodedTexts:
        documents = [document for document in self._encode(texts) if document]
        sequences = [sequence for document in documents for sequence in document]
        flat = np.concatenate(sequences) if sequences else np.empty(0, np.int32)
        return EncodedTexts(
            tokens=flat.astype(self.dtype),
            sequence_lengths=np.fromiter(map(len, sequences), "<i4", len(sequences)),
            sequences_per_document=np.fromiter(map(len, documents), "<i4", len(documents)),
            text_bytes=sum(len(t) if t.isascii() else len(t.encode()) for t in texts),
            empty=len(texts) - len(documents),
        )
