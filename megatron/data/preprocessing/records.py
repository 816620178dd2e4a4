"""One JSON line to its texts, or what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson


@dataclass(frozen=True)
class BadLine:
    """Why a line cannot be used."""

    number: int
    """Counted from 1."""
    reason: str
    """The kind of fault, the same words for all such lines."""
    detail: str
    """What was found in this one."""


def texts_of_line(line: bytes, number: int, keys: Sequence[str]) -> list[str] | BadLine:
    """The strings under `keys` in a line that holds a JSON object.

    orjson parses; what it refuses gets a second chance with Python's parser, which also takes NaN
    and the like in fields nobody asked for.
    """
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            return BadLine(number, "not JSON", f"{error}: {_shortened(line)}")
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


def _shortened(line: bytes) -> str:
    return repr(line[:60].decode("utf-8", "replace").rstrip()) + ("..." if len(line) > 60 else "")


def _described(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", type(None): "null"}
    return names.get(type(value), json.dumps(value)[:60])
