"""Records of JSON lines and JSON arrays, read one at a time in bounded memory."""

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
"""Bytes of a line or an array's item; a longer one is an error. preprocess_data.py has a flag."""
MAX_DEPTH = 1024
"""Brackets inside brackets; orjson's limit."""
_SKIPPED_BYTES = 1 << 20
_ARRAY_BYTES = 1 << 18
_SPACE = " \t\r\n"
_STRING = re.compile(rb'"[^"]*"?')
"""In JSON without escapes. It may lack its end, so that no attempt to match ever fails, which would
take time with each of the quotes in a line."""
_STEPS = np.array([(byte in b"[{") - (byte in b"]}") for byte in range(256)], np.int8)
"""By how much a byte changes the depth."""


@dataclass(frozen=True)
class BadLine:
    number: int
    """Counted from 1."""
    reason: str
    """The kind of error, the same words for all such lines."""
    detail: str
    """Fault of this line."""


def long_line(line: bytes, number: int, longest: int | None = None) -> BadLine | None:
    """Return an error if a line has more than `longest` bytes (default: `LONGEST_RECORD`), not all
    of which need to have been read."""
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
    """Offset and content, without the line break, of the lines that begin in a range of bytes. Only
    about the first `longest + 1` bytes of a longer line are read and returned; the caller
    recognises it by its length. With `start`, the stream must be seekable."""
    at = start
    if start:
        assert stop is not None
        stream.seek(start - 1)
        before = stream.readline(stop - start + 1)
        if not before.endswith(b"\n"):
            return  # the whole range is inside one line, which begins before it
        at += len(before) - 1
    elif stream.peek(3)[:3] == BYTE_ORDER_MARK:  # type: ignore[attr-defined]
        at = len(stream.read(3))
    while (stop is None or at < stop) and (line := stream.readline(longest + 2)):
        yield at, line.removesuffix(b"\n")
        at += len(line)
        while not line.endswith(b"\n") and (stop is None or at < stop):  # the rest of a long line
            line = stream.readline(_SKIPPED_BYTES)
            at += len(line)
            if not line:
                return


def lines_in(path: Path | str, stop: int) -> int:
    """Line breaks in the first `stop` bytes of a file."""
    lines, left = 0, stop
    with open(path, "rb") as file:
        while left > 0 and (block := file.read(min(left, _SKIPPED_BYTES))):
            lines += block.count(b"\n")
            left -= len(block)
    return lines


def texts_of_line(line: bytes, number: int, keys: Sequence[str]) -> list[str] | BadLine:
    """The strings under `keys` in a line with a JSON object. Lines that orjson refuses are parsed
    again by Python's parser, which accepts NaN and the like in other fields. The last value of a
    repeated key counts."""
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
        text = line.decode("utf-8-sig")  # files put together may have a mark in the middle
    except UnicodeDecodeError as error:
        return BadLine(number, "not UTF-8", f"{error}: {_shortened(line)}")
    if is_too_deep(line):
        return BadLine(number, "nested too deeply", f"over {MAX_DEPTH} levels: {_shortened(line)}")
    try:
        # As floats, numbers may have any number of digits.
        return json.loads(text, parse_int=float)
    except RecursionError:
        return BadLine(number, "nested too deeply", _shortened(line))
    except ValueError as error:
        return BadLine(number, "not JSON", f"{error}: {_shortened(line)}")


def is_too_deep(text: bytes, most: int = MAX_DEPTH) -> bool:
    """True if JSON, or what claims to be, has more than `most` brackets inside brackets."""
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
    """The items of a JSON array as JSON text, one at a time.

    Not ijson, which parses three times as fast, a small part of the time next to tokenization: it
    silently turns a lone surrogate into "?", ends at NaN, 1e999 or a long number in any field, and
    reads an item without an end into memory.
    """

    def __init__(self, stream: BinaryIO, max_bytes: int = LONGEST_RECORD) -> None:
        """An item of more than `max_bytes` is an error."""
        self._stream, self._max_bytes = stream, max_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        # Only the end of an item matters here: the caller parses keys and numbers.
        self._scan = json.JSONDecoder(parse_int=len, parse_float=len).raw_decode
        self._text, self._at, self._is_whole = "", 0, False
        self._number = 1

    def __iter__(self) -> Iterator[bytes]:
        """Each item without line breaks. Raises ValueError if it is not a JSON array."""
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
                if end < len(self._text) or self._is_whole:  # else a number may continue
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
        """The next one that is not white space; empty at the end of the file."""
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
