"""Strict parsing of JSON from users and other programs, with errors that name the file."""

from __future__ import annotations

import json
import math
import re
from typing import Any

MAX_DEPTH = 100
"""Maximum nesting of lists and objects. Code that processes the parsed value may be recursive."""
MAX_DIGITS = 300
"""Maximum number of digits of an integer, small enough for a conversion to float."""

_LONG_NUMBER = re.compile(rf"(?<!\d)\d{{{MAX_DIGITS + 1}}}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(
    text: str | bytes, where: str, *, lenient: bool = False, non_finite: bool = False
) -> Any:
    """Return the value of a JSON text.

    Args:
        text: the JSON text. Bytes are UTF-8, with or without a byte order mark.
        where: beginning of error messages: the file, and the flag that specified it.
        lenient: accept all that Python's parser accepts: NaN and Infinity, duplicate keys (the
          last one counts) and lone surrogates. Meant for other programs' files.
        non_finite: accept NaN and Infinity, but no duplicate keys or lone surrogates.

    Raises:
        ValueError: the text is not JSON, is nested more than `MAX_DEPTH` deep, has an integer of
          more than `MAX_DIGITS` digits, or has a value that was not accepted by the flags above.
    """
    try:
        return _parse(text, lenient, non_finite)
    except RecursionError:
        reason = f"nested more than {MAX_DEPTH} levels deep"
    except UnicodeDecodeError as error:
        reason = f"byte {error.start:,} is not UTF-8"
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at line {error.lineno}, column {error.colno}"
    except ValueError as error:
        reason = str(error)
    raise ValueError(f"{where} is not valid JSON: {reason}")


def _parse(text: str | bytes, lenient: bool, non_finite: bool) -> Any:
    text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    if not text.strip():
        raise ValueError("it is empty")
    hooks: dict[str, Any] = {}
    if _LONG_NUMBER.search(text):
        hooks["parse_int"] = _integer
    if not lenient:
        hooks["object_pairs_hook"] = _unique_keys
    if not (lenient or non_finite):
        hooks.update(parse_constant=_no_number, parse_float=_finite)
    content = json.loads(text, **hooks)
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(content)
    if not lenient and _SURROGATE.search(text):
        try:
            json.dumps(content, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("a text has half of a character (a lone surrogate)") from None
    return content


def _check_depth(content: Any) -> None:
    level = [content]
    for _ in range(MAX_DEPTH):
        children: list[Any] = []
        for item in level:
            inside = item.values() if isinstance(item, dict) else item
            children += [child for child in inside if isinstance(child, dict | list)]
        if not children:
            return
        level = children
    raise RecursionError


def _integer(digits: str) -> int:
    count = len(digits.lstrip("-"))
    if count > MAX_DIGITS:
        raise ValueError(f"an integer of {count:,} digits")
    return int(digits)


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"the number {number[:20]} is too large")
    return value


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f'the key "{twice[:80]}" occurs twice in one object')
    return content
