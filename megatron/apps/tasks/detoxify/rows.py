"""The files between the steps: JSON lines, an object in each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.apps.tasks.inputs import check_inputs
from megatron.config import ConfigError
from megatron.data.json_lines import BYTE_ORDER_MARK
from megatron.util.files import write_whole
from megatron.util.json_text import parse_json


@dataclass(frozen=True)
class Row:
    """A line of a file, and where it is, for messages."""

    place: str
    content: dict[str, Any]

    def text(self, key: str, remedy: str) -> str:
        """The string under a key. Raises ConfigError, with the remedy, if it has no such key."""
        found = self.content.get(key)
        if not isinstance(found, str):
            raise ConfigError(
                f'{self.place} has no string "{key}" (its keys: {", ".join(self.content)}): '
                f"{remedy}"
            )
        return found

    def toxicity(self, remedy: str) -> float | None:
        """The score of a row; None of a text that was not scored. Raises ConfigError, with the
        remedy, if it has none, or one outside of 0 to 1."""
        score = self.content.get("score", "")
        if score is None:
            return None
        found = score.get("toxicity") if isinstance(score, dict) else None
        if found is None or not is_score(found):
            raise ConfigError(
                f'{self.place}: "score" must be null or {{"toxicity": 0 to 1, ...}}, found '
                f"{json.dumps(score)[:60] or 'nothing'}: {remedy}"
            )
        return float(found)


def is_score(value: Any) -> bool:
    """Whether a value is a number from 0 to 1."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def read_rows(flag: str, path: str | None) -> list[Row]:
    """The rows of a file of JSON lines; blank lines are left out. Raises ConfigError, naming flag,
    file and line, if it cannot be read, a line is not a JSON object, or it has no line."""
    if not path:
        raise ConfigError(f"{flag} is missing: a file of JSON lines")
    check_inputs(flag, [path])
    rows = []
    lines = Path(path).read_bytes().removeprefix(BYTE_ORDER_MARK).split(b"\n")
    for number, line in enumerate(lines, 1):
        place = f"{flag} {path}, line {number}"
        if not line.strip():
            continue
        try:
            content = parse_json(line, place, lenient=True)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if not isinstance(content, dict):
            raise ConfigError(f"{place} is not a JSON object: {line[:60]!r}")
        rows.append(Row(place, content))
    if not rows:
        raise ConfigError(f"{flag} {path} is empty: it must have a JSON object in each line")
    return rows


def write_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes or replaces a file of JSON lines."""
    write_whole(Path(path), "".join(json.dumps(row) + "\n" for row in rows).encode())
