"""Lines of input files to records, and records back to lines."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from megatron.corpus.preprocessing.inputs import LineBatch
from megatron.data.json_lines import BadLine, texts_of_line


@dataclass(frozen=True)
class Record:
    """The JSON object of one line."""

    path: Path
    number: int
    """Of the line, from 1."""
    line: bytes
    """As it was read."""
    fields: dict[str, Any]

    def unchanged(self) -> bytes:
        """The line as it was, byte for byte, with one line feed at its end."""
        return self.line.rstrip(b"\r\n") + b"\n"

    def replaced(self, **changes: Any) -> bytes:
        """A line with some fields replaced or added; the others keep order and exact value.

        Python's parser comes first, because it keeps integers of any length, which orjson turns
        to floats; orjson where that one gives up (more than 4,300 digits, deep nesting).
        """
        try:
            fields = json.loads(self.line)
        except (ValueError, RecursionError):
            return orjson.dumps({**self.fields, **changes}) + b"\n"
        return json_line({**fields, **changes})


def json_line(fields: dict[str, Any]) -> bytes:
    """A JSON object as one line of UTF-8."""
    return json.dumps(fields, ensure_ascii=False).encode() + b"\n"


def records_of(batch: LineBatch, keys: Sequence[str]) -> Iterator[Record | BadLine]:
    """The records of a batch; each has strings under `keys`. Blank lines are passed over."""
    for number, line in enumerate(batch.lines, batch.first_line):
        if not line.isspace():
            yield _record(batch.path, number, line, keys)


def _record(path: Path, number: int, line: bytes, keys: Sequence[str]) -> Record | BadLine:
    texts = texts_of_line(line, number, keys)
    if isinstance(texts, BadLine):
        return texts
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError:  # NaN, or a lone surrogate, which no UTF-8 file can hold
        try:
            fields = json.loads(line)
            json_line(fields)
        except UnicodeEncodeError as error:
            return BadLine(number, "a lone surrogate", str(error))
        except (ValueError, RecursionError) as error:
            return BadLine(number, "not JSON", str(error))
    return Record(path, number, line, fields)


class BadRecord(Exception):
    """A record that a step cannot use; its line counts as malformed."""

    def __init__(self, reason: str, detail: str) -> None:
        """As in BadLine."""
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


@dataclass
class Mapped:
    """What a step made of a batch of lines."""

    outputs: list[bytes]
    """Lines for each output."""
    counts: Counter[str] = field(default_factory=Counter)
    """How often what happened."""
    bad_lines: list[BadLine] = field(default_factory=list)
    documents: int = 0
    """Records that were read."""


def value_of(record: Record, key: str) -> Any:
    """What a record has under a key, of whatever type.

    Raises:
        BadRecord: nothing.
    """
    if key not in record.fields:
        present = ", ".join(f'"{name}"' for name in list(record.fields)[:8]) or "none"
        raise BadRecord(f'no key "{key}"', f"its keys: {present}")
    return record.fields[key]


Emit = tuple[int, bytes]
"""A number of an output, and a line for it."""
RecordStep = Callable[[Record, "Counter[str]"], Iterable[Emit]]
"""What is written for a record; takes note of what happened in the counts."""


def map_records(batch: LineBatch, keys: Sequence[str], step: RecordStep, outputs: int) -> Mapped:
    """Applies a step to each record of a batch."""
    pieces: list[list[bytes]] = [[] for _ in range(outputs)]
    mapped = Mapped([])
    for record in records_of(batch, keys):
        if isinstance(record, BadLine):
            mapped.bad_lines.append(record)
            continue
        try:
            emitted = list(step(record, mapped.counts))
        except BadRecord as error:
            mapped.bad_lines.append(BadLine(record.number, error.reason, error.detail))
            continue
        mapped.documents += 1
        for output, line in emitted:
            pieces[output].append(line)
    mapped.outputs = [b"".join(lines) for lines in pieces]
    return mapped
