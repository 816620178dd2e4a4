"""Start records and configurations of runs, limited in size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from megatron.util.files import read_regular
from megatron.util.json_text import parse_json

MOST_BYTES = 1 << 22  # maximum bytes of a record or configuration file
MOST_VALUES = 5000
LONGEST_NAME = 300
LONGEST_VALUE = 10_000  # maximum characters of a configuration value, or of a text in the record
_MOST_TEXT = 1 << 20
_MOST_ENTRIES = 2000
_MOST_STARTS = 10_000
# Records are also searched for below the metrics folder, because they are often in the checkpoint
# folder.
_LEVELS = ("", "*/", "*/*/")


class StartNotes(NamedTuple):
    """Last start of a run, for display: its record (None if missing or malformed), its
    configuration by names such as ``model.num_layers``, and a message for each omitted part."""

    record: dict[str, Any] | None
    configuration: dict[str, Any]
    left_out: list[str]


def newest_record(metrics: Path) -> Path | None:
    """Return the folder of the last start's record near a metrics file, or None. If there are
    several runs, return the one whose configuration contains the path of the metrics file."""
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
    """Return whether a start wrote this metrics file, according to the path in the start's
    configuration."""
    record, configuration, _ = read_record(start)
    name = configuration.get("logging.metrics_file")
    folder = (record or {}).get("folder")
    if not isinstance(name, str) or not isinstance(folder, str):
        return False
    try:
        return Path(folder, name).resolve() == metrics.resolve()
    except (OSError, ValueError):  # the value is not a valid path
        return False


def read_record(folder: Path) -> StartNotes:
    """Return the record and configuration of a start."""
    left_out: list[str] = []
    record = _read(folder / "record.json", left_out)
    configuration = _read(folder / "config.json", left_out)
    shown = None if record is None else _shown(record, left_out)
    return StartNotes(shown, _flat(configuration or {}, left_out), left_out)


def _read(path: Path, left_out: list[str]) -> dict[str, Any] | None:
    try:
        content = parse_json(read_regular(path, MOST_BYTES), str(path), lenient=True)
        # fail now if the content cannot be sent to the page: orjson refuses integers beyond 64 bits
        orjson.dumps(content)
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
    """Flatten nested values into a dictionary with dotted names, up to the size limits."""
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
    """Yield dotted names and values. Values under a name that is too long are not flattened
    further, so that names stay bounded in length."""
    for name, value in values.items():
        whole = prefix + name
        if isinstance(value, dict) and value and len(whole) <= LONGEST_NAME:
            yield from _leaves(value, f"{whole}.")
        else:
            yield whole, value


_ENTRIES: Mapping[str, Any] = {
    **dict.fromkeys(("began", "ended", "end", "folder"), str),
    **dict.fromkeys(("start", "world_size", "last_iteration"), float),
    **dict.fromkeys(("command", "launcher"), [str]),
    "git": {"commit": str, "branch": str, "changed": bool},
    "versions": {"python": str, "torch": str, "deepspeed": str},
    "hosts": [{"host": str, "devices": [str], "ranks": [float]}],
    "data": [{"path": str, "part": str, "weight": float}],
}
"""Entries of a record that the page displays, with their types."""


def _shown(record: Mapping[str, Any], left_out: list[str]) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for name, kind in _ENTRIES.items():
        value = record.get(name)
        if value is None:
            continue
        try:
            shown[name] = _cleaned(value, kind)
        except ValueError as error:
            left_out.append(f"record.json: {name} is left out: {error}")
        if isinstance(value, list) and len(value) > _MOST_ENTRIES:
            left_out.append(
                f"record.json: {name} is cut to the first {_MOST_ENTRIES:,} of {len(value):,}"
            )
    return shown


def _cleaned(value: Any, kind: Any) -> Any:
    """Return a value, truncated to the size limits. Raises ValueError if it is not of the expected
    kind."""
    if kind is bool:
        return bool(value)
    if kind is float and type(value) in (int, float):
        return value
    if kind is str and isinstance(value, str):
        return value[:LONGEST_VALUE]
    if isinstance(kind, list) and isinstance(value, list):
        return [_cleaned(entry, kind[0]) for entry in value[:_MOST_ENTRIES]]
    if isinstance(kind, dict) and isinstance(value, dict):
        present = {name: value[name] for name in kind if value.get(name) is not None}
        return {name: _cleaned(entry, kind[name]) for name, entry in present.items()}
    words = {str: "a text", float: "a number"}.get(kind) if isinstance(kind, type) else None
    raise ValueError(f"expected {words or ('a list' if isinstance(kind, list) else 'an object')}")
