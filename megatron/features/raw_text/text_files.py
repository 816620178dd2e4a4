"""Text files at a data path, and access to their records by offset: JSON lines, and tables in CSV
or TSV.

A record can be read from its offset alone, so that no file needs to stay in memory.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from megatron.data.corpora import expand
from megatron.features.raw_text.encoder import TextEncoder, refused
from megatron.features.raw_text.flags import PACKED_ENDINGS, TEXT_ENDINGS
from megatron.features.raw_text.records import (
    BYTE_ORDER_MARK,
    LONGEST_RECORD,
    BadLine,
    lines_in,
    long_line,
    read_lines,
    texts_of_line,
)
from megatron.util.digests import digest_of_sample
from megatron.util.json_text import parse_json
from megatron.util.progress import progress_bar
from megatron.util.workers import map_in_order, usable_processors

_RANGE_BYTES = 1 << 24
_DIGEST_BYTES = 1 << 16
_DIGEST_BLOCKS = 64

TextRecord = tuple[int, str | BadLine]
"""(offset of a record in its file, its text or its error)."""


class TextFile(NamedTuple):
    """Text file, with its size and modification time when it was opened."""

    path: str
    size: int
    """Size in bytes."""
    modified_ns: int

    @classmethod
    def of(cls, path: str) -> TextFile:
        """Return the file at a path, with its current size and modification time."""
        stat = os.stat(path)
        return cls(path, stat.st_size, stat.st_mtime_ns)

    @property
    def has_columns(self) -> bool:
        """True if the file is a table (.csv, .tsv) instead of JSON lines."""
        return self.path.endswith((".csv", ".tsv"))

    @property
    def identity(self) -> list[Any]:
        """File name, size, modification time, and a digest of up to 64 evenly spaced blocks of 64
        KiB, including the first and the last, as JSON values."""
        digest = digest_of_sample(Path(self.path), _DIGEST_BLOCKS, _DIGEST_BYTES)
        return [os.path.basename(self.path), self.size, self.modified_ns, digest]


def text_files(path: str, endings: tuple[str, ...] = TEXT_ENDINGS) -> list[TextFile]:
    """Return the files at a path: the file itself, all matches of a glob, or a folder's files with
    one of `endings`. They are sorted. Raises FileNotFoundError if no file exists, and ValueError if
    a file is compressed or the path is a URL."""
    files = [str(p) for p in expand(path, endings)]
    for name in files:
        if name.endswith(PACKED_ENDINGS) and not name.endswith(endings):
            raise ValueError(
                f"{name} cannot be read in place: decompress it to JSON lines, or convert its text "
                "to a .bin/.idx with tools/preprocess_data.py"
            )
    return [TextFile.of(name) for name in files]


class TextRecords(ABC):
    """Records of a text file. Only the constructor's arguments are pickled."""

    def __init__(self, file: TextFile, key: str, delim: str | None = None) -> None:
        self.file, self._key, self._delim = file, key, delim

    def __reduce__(self) -> tuple[type[TextRecords], tuple[TextFile, str, str | None]]:
        return type(self), (self.file, self._key, self._delim)

    @abstractmethod
    def ranges(self) -> list[tuple[int, int]]:
        """Return (start, stop) byte ranges that different processes can read independently."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Iterator[TextRecord]:
        """Yield the nonempty records that begin in the byte range, which is one of `ranges`."""

    def text_at(self, start: int, stop: int) -> str:
        """Return the text of the record that begins at byte `start` and ends at or before `stop`.
        Raises ValueError if the bytes are no longer a valid record because the file has changed."""
        text = self._first(os.pread(self._open.fileno(), stop - start, start))
        if isinstance(text, BadLine):
            raise changed(self.file, start)
        return text

    @abstractmethod
    def _first(self, content: bytes) -> str | BadLine: ...

    @cached_property
    def _open(self) -> BinaryIO:
        return open(self.file.path, "rb", buffering=0)


class JsonLines(TextRecords):
    """Records of a file with one JSON object per line. The text is the string under a given key."""

    def ranges(self) -> list[tuple[int, int]]:
        starts = range(0, self.file.size, _RANGE_BYTES)
        return [(start, min(start + _RANGE_BYTES, self.file.size)) for start in starts]

    def read(self, start: int, stop: int) -> Iterator[TextRecord]:
        with open(self.file.path, "rb") as file:
            for offset, line in read_lines(file, LONGEST_RECORD, start, stop):
                if too_long := long_line(line, 0, LONGEST_RECORD):
                    yield offset, too_long
                    return
                if line and not line.isspace():
                    yield offset, self._first(line)

    def _first(self, content: bytes) -> str | BadLine:
        texts = texts_of_line(content.partition(b"\n")[0], 0, [self._key])
        return texts if isinstance(texts, BadLine) else texts[0]


class Table(TextRecords):
    """Records of a CSV or TSV file. Its first row has the column names, one of which is the text's.
    In a comma-separated table, fields may be quoted and contain line breaks. In a tab-separated
    one, a quotation mark is an ordinary character."""

    def __init__(self, file: TextFile, key: str, delim: str | None) -> None:
        super().__init__(file, key, delim or ("\t" if file.path.endswith(".tsv") else ","))
        if len(str(self._delim)) != 1:
            raise ValueError(f"--delim {delim!r} must be one character, such as ';'")

    def ranges(self) -> list[tuple[int, int]]:
        """Return the whole file as one range, because a row's start depends on all earlier rows."""
        return [(0, self.file.size)]

    def read(self, start: int, stop: int) -> Iterator[TextRecord]:
        assert (start, stop) == (0, self.file.size)
        with open(self.file.path, "rb") as file:
            rows = self._rows(file)
            try:
                next(rows, None)
                for offset, row in rows:
                    if row:
                        yield offset, self._text(row)
            except (csv.Error, UnicodeDecodeError) as error:
                yield rows.row_start, BadLine(0, "not a row of a table", str(error))

    def _first(self, content: bytes) -> str | BadLine:
        try:
            return self._text(next(self._rows(io.BytesIO(content)), (0, []))[1])
        except (csv.Error, UnicodeDecodeError) as error:
            return BadLine(0, "not a row of a table", str(error))

    def _text(self, row: list[str]) -> str | BadLine:
        if self._place >= len(row):
            return BadLine(0, f'no column "{self._key}"', f"the row has {len(row)} columns")
        return row[self._place]

    def _rows(self, file: BinaryIO) -> TableRows:
        assert self._delim is not None
        return TableRows(file, self._delim)

    @cached_property
    def _place(self) -> int:
        with open(self.file.path, "rb") as file:
            try:
                names = next(self._rows(file), (0, []))[1]
            except (csv.Error, UnicodeDecodeError) as error:
                raise ValueError(f"{self.file.path}, line 1: {error}") from None
        if self._key not in names:
            raise ValueError(
                f"--text-key {self._key}: {self.file.path} has no such column; its first row is "
                f"{', '.join(names[:8]) or 'empty'}"
            )
        return names.index(self._key)


class _Unquoted(csv.excel):
    quoting = csv.QUOTE_NONE


class TableRows(Iterator[tuple[int, list[str]]]):
    """Iterator over a table's rows, which yields (offset, fields)."""

    def __init__(self, file: BinaryIO, delim: str, strict: bool = False) -> None:
        """Create an iterator. With ``strict``, an unclosed quotation mark raises csv.Error."""
        # this limit is process-wide; the default is 131,072 characters
        csv.field_size_limit(LONGEST_RECORD)
        self._file, self._position, self.row_start = file, 0, 0
        style = csv.excel if delim != "\t" else _Unquoted
        self._rows = csv.reader(self._lines(), style, delimiter=delim, strict=strict)

    @property
    def line(self) -> int:
        """Number of the last line that was read, counted from 1."""
        return self._rows.line_num

    def __next__(self) -> tuple[int, list[str]]:
        self.row_start = self._position
        return self.row_start, next(self._rows)

    def _lines(self) -> Iterator[str]:
        while line := self._file.readline(LONGEST_RECORD + 1):
            if too_long := long_line(line, 0, LONGEST_RECORD):
                raise csv.Error(too_long.reason)
            text = line.removeprefix(BYTE_ORDER_MARK) if self._position == 0 else line
            self._position += len(line)
            yield text.decode("utf-8")


def text_records(path: str, text_key: str, delim: str | None) -> list[TextRecords]:
    """Return the records at a path, one `TextRecords` per file. The path is a file, folder or glob.
    `text_key` is the text's JSON key or column. A `delim` of None means a comma in .csv and a tab
    in .tsv files. Raises FileNotFoundError if no file exists."""
    return [
        (Table if file.has_columns else JsonLines)(file, text_key, delim)
        for file in text_files(path)
    ]


def changed(file: TextFile, offset: int) -> ValueError:
    """Return the error for a record that is no longer at its indexed offset."""
    return ValueError(
        f"{file.path} has changed while it was in use: there is a different record at byte "
        f"{offset} than when it was indexed; start the run again (its samples will be different)"
    )


logger = logging.getLogger(__name__)

_WORTH_PROCESSES = 1 << 25
"""Bytes of text from which worker processes are worth starting. Each loads its own tokenizer."""
_TEXTS_AT_ONCE = 1000
_CHARACTERS_AT_ONCE = 1 << 20
_SHOWN_BYTES = 60


Range = tuple[TextRecords, tuple[int, int]]
Scanned = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Arrays for the d nonempty documents in a byte range: offset of each record in the file,
int64[d]; number of tokens in each of the n sequences, int32[n]; number of sequences per
document, int32[d]."""


def scan(
    records: Sequence[TextRecords], encoder: TextEncoder, workers: int | None = None
) -> dict[str, np.ndarray]:
    """Read all records and count the tokens of their documents. By default, one process per
    processor is used for 32 MiB of text or more, and otherwise only this process.

    Return record_offsets, int64[documents], the start of each record in the concatenated files;
    sequence_lengths, int32[sequences]; and document_indices, int64[documents + 1]. Raises
    ValueError if a record is malformed or cannot be tokenized, and ChildProcessError if a process
    died.
    """
    *bases, size = accumulate((r.file.size for r in records), initial=0)
    ranges = [
        (r, base, span) for r, base in zip(records, bases, strict=True) for span in r.ranges()
    ]
    if workers is None:
        workers = usable_processors() if size >= _WORTH_PROCESSES else 1
    workers = min(workers, len(ranges))
    tasks = ((r, span) for r, _, span in ranges)
    offsets, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int32)]
    counts = [np.zeros(1, np.int64)]
    try:
        scans = map_in_order(tasks, partial(_scanner, encoder), workers if workers > 1 else 0)
        with progress_bar("counting tokens", total=size) as bar:
            for (_, base, (start, stop)), (_, lines) in zip(ranges, scans, strict=True):
                offsets.append(lines[0] + base)
                lengths.append(lines[1])
                counts.append(lines[2])
                bar.update(stop - start)
    except ChildProcessError as error:
        raise ChildProcessError(f"counting tokens: {error}") from error
    return {
        "record_offsets": np.concatenate(offsets),
        "sequence_lengths": np.concatenate(lengths),
        "document_indices": np.cumsum(np.concatenate(counts), dtype=np.int64),
    }


def _scanner(encoder: TextEncoder) -> Callable[[Range], Scanned]:
    return lambda task: _scan_range(*task, encoder)


def _scan_range(records: TextRecords, span: tuple[int, int], encoder: TextEncoder) -> Scanned:
    offsets: list[int] = []
    lengths: list[int] = []
    counts: list[int] = []
    for batch in batches(records, span):
        starts, texts = zip(*batch, strict=True)
        try:
            documents = encoder(texts)
        except ValueError:
            bad = dict(refused(encoder, texts))
            # if every text fails, the error is not specific to one
            if len(bad) < len(texts) or len(texts) == 1:
                place, error = next(iter(bad.items()))
                where = located(records, starts[place])
                raise ValueError(f"{where}: a text that cannot be tokenized ({error})") from None
            raise
        for start, document in zip(starts, documents, strict=True):
            if document:
                offsets.append(start)
                counts.append(len(document))
                lengths.extend(map(len, document))
    return np.array(offsets, np.int64), np.array(lengths, np.int32), np.array(counts, np.int32)


def batches(records: TextRecords, span: tuple[int, int]) -> Iterator[list[tuple[int, str]]]:
    """Yield batches of (offset, text) for the records that begin in a byte range. Batches have a
    bounded size. Raises ValueError if a record is malformed."""
    batch: list[tuple[int, str]] = []
    characters = 0
    for start, text in records.read(*span):
        if isinstance(text, BadLine):
            raise ValueError(
                f"{located(records, start)}: {text.reason} ({text.detail}); {_wanted(records)}"
            )
        batch.append((start, text))
        characters += len(text)
        if len(batch) == _TEXTS_AT_ONCE or characters >= _CHARACTERS_AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def located(records: TextRecords, offset: int) -> str:
    """Return a record's file and line number (from 1), for an error message."""
    return f"{records.file.path}, line {1 + lines_in(records.file.path, offset)}"


def _wanted(records: TextRecords) -> str:
    if records.file.has_columns:
        return "a row must have the column that --text-key names"
    with open(records.file.path, "rb") as file:
        if file.read(_SHOWN_BYTES).removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"["):
            return (
                "the file is one JSON array: write it as JSON lines (jq -c '.[]'), or make a "
                ".bin/.idx of it with tools/preprocess_data.py"
            )
    return (
        "a line must be a JSON object with a string under the key that --text-key names "
        "(tools/preprocess_data.py --on-bad-line skip leaves such lines out)"
    )


def say_what_changed(folder: Path | None, depends_on: dict[str, Any], name: str) -> None:
    """Warn if the cache has an index of the same files with other content, and name those files."""
    now = json.loads(json.dumps(depends_on))  # converts tuples to lists, as in the stored JSON
    files = {file[0]: file for file in now.pop("files")}
    for path in folder.glob(f"{name}-*/description.json") if folder is not None else ():
        try:
            before = parse_json(path.read_bytes(), str(path), lenient=True)["depends_on"]
            old = {file[0]: file for file in before.pop("files")}
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            continue
        if before == now and old.keys() == files.keys():
            named = ", ".join(name for name in files if old[name] != files[name])
            logger.warning(
                f"{named} changed since its documents were last indexed: a run that continues with "
                "it now sees different samples than it would have seen"
            )
            return
