"""Records of how runs were started, and their configurations, of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from megatron.util.files import read_regular
from megatron.util.json_text import parse_json

MOST_BYTES = 1 << 22
"""Size of a record or a configuration."""
MOST_VALUES = 5000
LONGEST_NAME = 300
LONGEST_VALUE = 10_000
"""Characters of a value of the configuration, or of an entry of the record."""
_MOST_TEXT = 1 << 20
_MOST_ENTRIES = 2000
_MOST_STARTS = 10_000
_LEVELS = ("", "*/", "*/*/")
"""Folders below that of the metrics in which a record may be: the checkpoints' is often one."""


class StartNotes(NamedTuple):
    """The last start of a run, as it is shown.

    Attributes:
        record: None where it is missing or broken.
        configuration: flat, by names such as ``model.num_layers``.
        left_out: a line for each part that there was no room for.
    """

    record: dict[str, Any] | None
    configuration: dict[str, Any]
    left_out: list[str]


def newest_record(metrics: Path) -> Path | None:
    """The folder of the last start's record near a file of metrics, None if nothing is there: of
    several runs in one place that whose configuration names the file."""
    for level in _LEVELS:
        runs: dict[Path, list[Path]] = {}
        for path in islice(metrics.parent.glob(f"{level}run/*/record.json"), _MOST_STARTS):
            if path.parent.name.isdecimal() and len(path.parent.name) < 10:
                runs.setdefault(path.parent.parent, []).append(path.parent)
        newest = [max(runs[run], key=lambda start: int(start.name)) for run in sorted(runs)]
        named = next((start for start in newest if _names(start, metrics)), None)
        if named or len(newest) == 1:
            return named or newest[0]
    return None


def _names(start: Path, metrics: Path) -> bool:
    """Whether a start wrote this file, by the path in its configuration."""
    record, configuration, _ = read_record(start)
    name = configuration.get("logging.metrics_file")
    folder = (record or {}).get("folder")
    if not isinstance(name, str) or not isinstance(folder, str):
        return False
    try:
        return Path(folder, name).resolve() == metrics.resolve()
    except (OSError, ValueError):  # of what is not a path
        return False


def read_record(folder: Path) -> StartNotes:
    """The record of a start and its configuration, of bounded size whatever is in the files."""
    left_out: list[str] = []
    record = _read(folder / "record.json", left_out)
    configuration = _read(folder / "config.json", left_out)
    shown = None if record is None else _shown(record, left_out)
    return StartNotes(shown, _flat(configuration or {}, left_out), left_out)


def _read(path: Path, left_out: list[str]) -> dict[str, Any] | None:
    try:
        content = parse_json(read_regular(path, MOST_BYTES), str(path), lenient=True)
        orjson.dumps(content)  # as the page gets it, which takes no numbers beyond 64 bits
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error).removeprefix(f"{path} ")
        left_out.append(f"{path.name} is left out: {reason}")
        return None
    if not isinstance(content, dict):
        left_out.append(f"{path.name} is left out: it is not an object")
        return None
    return content


def _flat(values: Mapping[str, Any], left_out: list[str]) -> dict[str, Any]:
    """Values by their names, as many as there is room for."""
    rows: dict[str, Any] = {}
    room, missing = _MOST_TEXT, 0
    for name, value in _leaves(values):
        text = orjson.dumps(value)
        fits = len(name) <= LONGEST_NAME and len(text) <= LONGEST_VALUE
        if fits and len(name) + len(text) <= room and len(rows) < MOST_VALUES:
            rows[name] = value
            room -= len(name) + len(text)
        else:
            missing += 1
    if missing:
        left_out.append(
            f"config.json: {missing:,} values are left out, beyond {MOST_VALUES:,} of them, "
            f"{_MOST_TEXT:,} characters in all, {LONGEST_VALUE:,} of a value or {LONGEST_NAME} of "
            "a name"
        )
    return rows


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values. What is below a name that is too long stays together, so that no name gets
    longer than two."""
    for name, value in values.items():
        whole = prefix + name
        if isinstance(value, dict) and value and len(whole) <= LONGEST_NAME:
            yield from _leaves(value, f"{whole}.")
        else:
            yield whole, value


def _shown(record: Mapping[str, Any], left_out: list[str]) -> dict[str, Any]:
    """The entries of a record that the page has a place for, if they are what a run writes."""
    shown: dict[str, Any] = {}
    for name, cleaned in _ENTRIES.items():
        value = record.get(name)
        if value is None:
            continue
        try:
            shown[name] = cleaned(value)
        except ValueError as error:
            left_out.append(f"record.json: {name} is left out: {error}")
        if isinstance(value, list) and len(value) > _MOST_ENTRIES:
            left_out.append(
                f"record.json: {name} is cut to the first {_MOST_ENTRIES:,} of {len(value):,}"
            )
    return shown


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("expected a text")
    return value[:LONGEST_VALUE]


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError("expected a number")
    return value  # type: ignore[no-any-return]


def _list_of(cleaned: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def clean(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise ValueError("expected a list")
        return [cleaned(entry) for entry in value[:_MOST_ENTRIES]]

    return clean


def _object(**entries: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def clean(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError("expected an object")
        present = {name: value[name] for name in entries if value.get(name) is not None}
        return {name: entries[name](entry) for name, entry in present.items()}

    return clean


_ENTRIES: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("began", "ended", "end", "folder"), _text),
    **dict.fromkeys(("start", "world_size", "last_iteration"), _number),
    **dict.fromkeys(("command", "launcher"), _list_of(_text)),
    "git": _object(commit=_text, branch=_text, changed=bool),
    "versions": _object(python=_text, torch=_text, deepspeed=_text),
    "hosts": _list_of(_object(host=_text, devices=_list_of(_text), ranks=_list_of(_number))),
    "data": _list_of(_object(path=_text, part=_text, weight=_number)),
}
"""The entries by name, each with what makes of a value one that the page can show."""
