"""Reading of JSON lines and JSON arrays one record at a time, in bounded memory."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LONGEST_RECORD = 1 << 26
"""Default maximum size, in bytes, of a line or array item. Longer ones are an error.
preprocess_data.py has a flag for it."""
MAX_DEPTH = 1024
"""Maximum nesting depth of JSON; orjson has the same limit."""
_SKIPPED_BYTES = 1 << 20
_ARRAY_BYTES = 1 << 18
_SPACE = " \t\r\n"
_STRING = re.compile(rb'"[^"]*"?')
"""JSON string without escapes. The closing quote is optional, so that a match never fails; a
failure at each of a line's quotes would take quadratic time."""
_STEPS = np.array([(byte in b"[{") - (byte in b"]}") for byte in range(256)], np.int8)
"""Change of the nesting depth by each byte: 1 for an opening bracket, -1 for a closing one."""


@dataclass(frozen=True)
class BadLine:
    number: int
    """Line number, counted from 1."""
    reason: str
    """Kind of error, with the same wording for all lines that have it."""
    detail: str
    """Details of this line's error."""


def long_line(line: bytes, number: int, longest: int | None = None) -> BadLine | None:
    """Return an error if a line has more than `longest` bytes (default: `LONGEST_RECORD`), else
    None. A truncated line is enough, if its prefix has more than `longest` bytes."""
    longest = LONGEST_RECORD if longest is None else longest
    if len(line) <= longest:
        return None
    return BadLine(number, f"longer than {longest / (1 << 20):g} MiB", f"{line[:40]!r}...")


def read_lines(
    stream: BinaryIO,
    longest: int = LONGEST_RECORD,
    start: int = 0,
    stop: int | None = None,
) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, content) of each line that begins in the byte range `start` to `stop`, without
    the line break. A line that is too long is truncated to about `longest + 1` bytes, and the
    caller recognises it by this length. The stream must be seekable if `start` is not 0."""
    at = start
    if start:
        assert stop is not None
        stream.seek(start - 1)
        before = stream.readline(stop - start + 1)
        if not before.endswith(b"\n"):
            return  # the whole range is inside a line that begins earlier
        at += len(before) - 1
    elif stream.peek(3)[:3] == BYTE_ORDER_MARK:  # type: ignore[attr-defined]
        at = len(stream.read(3))
    while (stop is None or at < stop) and (line := stream.readline(longest + 2)):
        yield at, line.removesuffix(b"\n")
        at += len(line)
        # skip the remainder of a long line
        while not line.endswith(b"\n") and (stop is None or at < stop):
            line = stream.readline(_SKIPPED_BYTES)
            at += len(line)
            if not line:
                return


def lines_in(path: Path | str, stop: int) -> int:
    """Return the number of line breaks in the first `stop` bytes of a file."""
    lines, left = 0, stop
    with open(path, "rb") as file:
        while left > 0 and (block := file.read(min(left, _SKIPPED_BYTES))):
            lines += block.count(b"\n")
            left -= len(block)
    return lines


def texts_of_line(line: bytes, number: int, keys: Sequence[str]) -> list[str] | BadLine:
    """Return the strings under `keys` in a line that is a JSON object, or the line's error. Lines
    that orjson rejects are parsed again by Python's parser, which accepts NaN and similar values in
    other fields. If a key is repeated, the last value counts."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        record = _second_chance(line, number)
        if isinstance(record, BadLine):
            return record
        texts = _texts(record, number, keys)
        if isinstance(texts, list):
            for key, text in zip(keys, texts, strict=True):
                if surrogate := _lone_surrogate(text):
                    return BadLine(
                        number, "a lone surrogate in a text", f'"{key}" contains {surrogate}'
                    )
        return texts
    return _texts(record, number, keys)


def _texts(record: Any, number: int, keys: Sequence[str]) -> list[str] | BadLine:
    if not isinstance(record, dict):
        return BadLine(number, "not a JSON object", f"found {_described(record)}")
    texts = []
    for key in keys:
        if key not in record:
            present = ", ".join(f'"{name}"' for name in list(record)[:8]) or "none"
            return BadLine(number, f'no key "{key}"', f"its keys: {present}")
        text = record[key]
        if not isinstance(text, str):
            return BadLine(number, f'"{key}" is not a string', f"found {_described(text)}")
        texts.append(text)
    return texts


def _second_chance(line: bytes, number: int) -> Any:
    try:
        # concatenated files may have byte order marks at line starts
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return BadLine(number, "not UTF-8", f"{error}: {_shortened(line)}")
    if is_too_deep(line):
        return BadLine(number, "nested too deeply", f"over {MAX_DEPTH} levels: {_shortened(line)}")
    try:
        # Parsing integers as floats allows any number of digits.
        return json.loads(text, parse_int=float)
    except RecursionError:
        return BadLine(number, "nested too deeply", _shortened(line))
    except ValueError as error:
        return BadLine(number, "not JSON", f"{error}: {_shortened(line)}")


def is_too_deep(text: bytes, most: int = MAX_DEPTH) -> bool:
    """Return whether JSON, valid or not, has more than `most` levels of nested brackets."""
    if text.count(b"[") + text.count(b"{") <= most:
        return False
    plain = _STRING.sub(b"", text.replace(b"\\\\", b"").replace(b'\\"', b""))
    depth = 0
    for start in range(0, len(plain), _SKIPPED_BYTES):
        part = np.frombuffer(plain[start : start + _SKIPPED_BYTES], np.uint8)
        depths = depth + np.cumsum(_STEPS[part], dtype=np.int64)
        if depths.max() > most:
            return True
        depth = int(depths[-1])
    return False


def _lone_surrogate(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(text[error.start]):04x}"
    return None


def _shortened(line: bytes) -> str:
    return repr(line[:60].decode("utf-8", "replace").rstrip()) + ("..." if len(line) > 60 else "")


def _described(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", type(None): "null"}
    return names.get(type(value), json.dumps(value)[:60])


class ArrayReader:
    """Iterator over the items of a JSON array, each as JSON text.

    ijson would parse three times as fast, but parsing takes little time compared with tokenization.
    ijson also silently turns a lone surrogate into "?", stops at NaN, 1e999 or a long number in any
    field, and reads an unterminated item into memory.
    """

    def __init__(self, stream: BinaryIO, max_bytes: int = LONGEST_RECORD) -> None:
        """Create a reader that raises an error for an item of more than `max_bytes` bytes."""
        self._stream, self._max_bytes = stream, max_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        # This only finds where an item ends; the caller parses its content.
        self._scan = json.JSONDecoder(parse_int=len, parse_float=len).raw_decode
        self._text, self._at, self._is_whole = "", 0, False
        self._number = 1

    def __iter__(self) -> Iterator[bytes]:
        """Yield each item without line breaks. Raises ValueError for anything but an array."""
        self._expect("[")
        if self._next_character() == "]":
            self._at += 1
        else:
            while True:
                yield self._item()
                self._number += 1
                if self._expect(",]") == "]":
                    break
        if self._next_character():
            raise self._error("something follows the array; is this a file of JSON lines?")

    def _item(self) -> bytes:
        self._next_character()
        while True:
            try:
                _, end = self._scan(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._is_whole:
                    raise self._error(f"not JSON: {error.msg}") from None
            except RecursionError:
                raise self._error("nested too deeply") from None
            else:
                # otherwise the item may be a number that continues
                if end < len(self._text) or self._is_whole:
                    item = self._text[self._at : end].replace("\r", " ").replace("\n", " ")
                    self._at = end
                    return item.encode()
            size = len(self._text) - self._at
            if size > self._max_bytes:
                raise self._error(f"more than {self._max_bytes} bytes long, or never ending")
            self._read(max(size, _ARRAY_BYTES))

    def _expect(self, wanted: str) -> str:
        character = self._next_character()
        if not character or character not in wanted:
            what = repr(character) if character else "the end of the file"
            raise self._error(f"expected {' or '.join(wanted)}, found {what}")
        self._at += 1
        return character

    def _next_character(self) -> str:
        """Skip white space, and return the next character without consuming it. Return "" at the
        end of the file."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if self._is_whole:
                return ""
            self._read(_ARRAY_BYTES)

    def _read(self, count: int) -> None:
        data = self._stream.read(count)
        self._is_whole = not data
        try:
            more = self._decode(data, final=self._is_whole)
        except UnicodeDecodeError as error:
            raise self._error(f"not UTF-8: {error}") from None
        self._text, self._at = self._text[self._at :] + more, 0

    def _error(self, finding: str) -> ValueError:
        return ValueError(f"item {self._number} of the array: {finding}")
