"""One JSON line to its texts, or what is wrong with it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

MAX_DEPTH = 1024
"""Brackets inside brackets, as orjson has it."""
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')
_BRACKETS = re.compile(r"[\[\]{}]")


@dataclass(frozen=True)
class BadLine:
    """Why a line cannot be used."""

    number: int
    """Counted from 1."""
    reason: str
    """The kind of fault, the same words for all such lines."""
    detail: str
    """What was found in this one."""

    def shifted(self, lines: int) -> BadLine:
        """The same line, where `lines` come before the one that was number 1."""
        return replace(self, number=self.number + lines)


def texts_of_line(line: bytes, number: int, keys: Sequence[str]) -> list[str] | BadLine:
    """The strings under `keys` in a line that holds a JSON object.

    orjson parses; what it refuses gets a second chance with Python's parser, which also takes NaN
    and the like in fields nobody asked for. Of a key that is there twice, the last one counts.
    """
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        record = _second_chance(line, number)
        if isinstance(record, BadLine):
            return record
        found = _texts(record, number, keys)
        if isinstance(found, list):
            for key, text in zip(keys, found, strict=True):
                if surrogate := _lone_surrogate(text):
                    return BadLine(
                        number, "a lone surrogate in a text", f'"{key}" holds {surrogate}'
                    )
        return found
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
    if _is_too_deep(text):
        return BadLine(number, "nested too deeply", f"over {MAX_DEPTH} levels: {_shortened(line)}")
    try:
        # As floats, numbers may have any number of digits.
        return json.loads(text, parse_int=float)
    except RecursionError:
        return BadLine(number, "nested too deeply", _shortened(line))
    except ValueError as error:
        return BadLine(number, "not JSON", f"{error}: {_shortened(line)}")


def _is_too_deep(text: str) -> bool:
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    depth = 0
    for bracket in _BRACKETS.findall(_STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        if depth > MAX_DEPTH:
            return True
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
