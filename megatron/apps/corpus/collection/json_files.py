"""JSON-lines files: records of input lines, and outputs that appear only when complete."""

from __future__ import annotations

import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import zstandard

from megatron.apps.corpus.preprocessing.inputs import LineBatch, read_batches
from megatron.features.raw_text.records import BadLine, is_too_deep, long_line, texts_of_line
from megatron.util.files import Lock, LockTakenError, naming, sync, write_whole

_MAX_DEPTH = 500  # maximum nesting that Python can write as JSON
_PACKERS: dict[str, Callable[[], zlib._Compress | zstandard.ZstdCompressionObj]] = {
    ".gz": lambda: zlib.compressobj(6, zlib.DEFLATED, 31),  # 31: a gzip member without a timestamp
    ".zst": lambda: zstandard.ZstdCompressor(3).compressobj(),
}


class BadRecordError(Exception):
    """Raised by a step for a record that it cannot use. The record's line counts as malformed."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class JsonRecord:
    path: Path
    number: int  # line number, from 1
    line: bytes
    fields: dict[str, Any]

    def value(self, key: str) -> Any:
        """Return the value of a key. Raises BadRecordError if the record lacks the key."""
        if key not in self.fields:
            present = ", ".join(f'"{name}"' for name in list(self.fields)[:8]) or "none"
            raise BadRecordError(f'no key "{key}"', f"its keys: {present}")
        return self.fields[key]

    def unchanged(self) -> bytes:
        """Return the original bytes of the line, ending with exactly one line feed."""
        return self.line.rstrip(b"\r\n") + b"\n"

    def replaced(self, **changes: Any) -> bytes:
        """Return the record as a line, with fields replaced or added. Other fields keep their order
        and exact values."""
        try:
            # json keeps long integers exactly; orjson converts them to floats
            fields = json.loads(self.line)
            return json_line({**fields, **changes})
        except (ValueError, RecursionError):  # raised for integers of over 4,300 digits
            try:
                return orjson.dumps({**self.fields, **changes}) + b"\n"
            except TypeError as error:
                raise BadRecordError("cannot be written as JSON", str(error)) from None


def json_line(fields: dict[str, Any]) -> bytes:
    """Return a JSON object as one line of UTF-8."""
    return json.dumps(fields, ensure_ascii=False).encode() + b"\n"


def records_of(batch: LineBatch, keys: Sequence[str] = ()) -> Iterator[JsonRecord | BadLine]:
    """Yield the records of a batch, or the reason why a line is malformed. Every record must
    contain strings under `keys`. Blank lines are skipped."""
    for number, line in enumerate(batch.lines, batch.first_line):
        if too_long := long_line(line, number):
            yield too_long
        elif not line.isspace():
            yield _record(batch.path, number, line, keys)


def _record(path: Path, number: int, line: bytes, keys: Sequence[str]) -> JsonRecord | BadLine:
    texts = texts_of_line(line, number, keys)
    if isinstance(texts, BadLine):
        return texts
    if is_too_deep(line, _MAX_DEPTH):
        return BadLine(number, "nested too deeply", f"over {_MAX_DEPTH} levels")
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError:  # NaN, or a lone surrogate, which cannot be written as UTF-8
        try:
            fields = json.loads(line)
            if rb"\u" in line:
                json_line(fields)
        except UnicodeEncodeError as error:
            return BadLine(number, "a lone surrogate", str(error))
        except (ValueError, RecursionError) as error:
            return BadLine(number, "not JSON", str(error))
    return JsonRecord(path, number, line, fields)


def read_records(path: Path, keys: Sequence[str] = ()) -> Iterator[JsonRecord]:
    """Yield the records of a file. Raises ValueError, with file and line, if one is malformed."""
    for batch in read_batches([path]):
        for record in records_of(batch, keys):
            if isinstance(record, BadLine):
                raise ValueError(f"{path}, line {record.number}: {record.reason} ({record.detail})")
            yield record


@dataclass
class BatchResult:
    outputs: list[bytes]  # concatenated lines for each output
    # numbers of events by name, for the report
    counts: Counter[str] = field(default_factory=Counter)
    bad_lines: list[BadLine] = field(default_factory=list)
    documents: int = 0


BatchStep = Callable[[LineBatch], BatchResult]
RecordStep = Callable[[JsonRecord, "Counter[str]"], Iterable[tuple[int, bytes]]]
"""Function that yields pairs (output number, line) for a record, and counts events of the batch."""


def map_records(
    batch: LineBatch, keys: Sequence[str], step: RecordStep, outputs: int
) -> BatchResult:
    """Apply a step to each record of a batch. Output numbers from `outputs` on are dropped."""
    result = BatchResult([])
    lines: list[list[bytes]] = [[] for _ in range(outputs)]
    for record in records_of(batch, keys):
        if isinstance(record, BadLine):
            result.bad_lines.append(record)
            continue
        try:
            written = list(step(record, result.counts))
        except BadRecordError as error:
            result.bad_lines.append(BadLine(record.number, error.reason, error.detail))
            continue
        result.documents += 1
        for output, line in written:
            if output < outputs:
                lines[output].append(line)
    result.outputs = [b"".join(parts) for parts in lines]
    return result


def partial_path(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


class OutputFile:
    """File that grows from one checkpoint to the next, compressed depending on its name. Each
    checkpoint ends a gzip member or zstd frame, so that the bytes before it can be decompressed."""

    def __init__(self, path: Path, size: int) -> None:
        """Open PATH.partial, and truncate it to `size` bytes, its length at the last checkpoint.
        Raises OSError if it cannot be written, or if another process is writing to it."""
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
        if data and self._pack is not None:
            self._packer = self._packer or self._pack()
            data = self._packer.compress(data)
        with naming(self._file.name):
            self._file.write(data)

    def checkpoint(self) -> int:
        """Sync everything to disk and return the file size in bytes."""
        with naming(self._file.name):
            if self._packer is not None:
                self._file.write(self._packer.flush())
                self._packer = None
            sync(self._file)
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        self._lock.release()


def publish(path: Path) -> None:
    """Rename a complete PATH.partial to PATH. Does nothing if there is no PATH.partial."""
    if partial_path(path).exists():
        os.replace(partial_path(path), path)


def write_packed(path: Path, data: bytes) -> None:
    """Write a whole file at once, compressed depending on its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if data and (pack := _PACKERS.get(path.suffix)):
        packer = pack()
        data = packer.compress(data) + packer.flush()
    write_whole(path, data)
