"""What a run's folder says of it besides its metrics: how it was started, and its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from megatron.util.files import read_regular
from megatron.util.json_text import parse_json

_LEVELS = ("", "*/", "*/*/")
"""Folders below that of the metrics in which a record may be: the checkpoints' is often one."""


def newest_record(metrics: Path) -> Path | None:
    """The folder of the last start's record near a file of metrics, None if nothing is there: of
    several runs in one place that whose configuration names the file."""
    for level in _LEVELS:
        runs: dict[Path, list[Path]] = {}
        for path in metrics.parent.glob(f"{level}run/*/record.json"):
            if path.parent.name.isdecimal():
                runs.setdefault(path.parent.parent, []).append(path.parent)
        newest = [max(runs[run], key=lambda start: int(start.name)) for run in sorted(runs)]
        named = [start for start in newest if _names(start, metrics)]
        if named or len(newest) == 1:
            return (named or newest)[0]
    return None


def _names(start: Path, metrics: Path) -> bool:
    """Whether a start wrote this file, by the path in its configuration."""
    record, configuration = read_record(start)
    name = configuration.get("logging.metrics_file")
    folder = (record or {}).get("folder")
    if not isinstance(name, str) or not isinstance(folder, str):
        return False
    try:
        return Path(folder, name).resolve() == metrics.resolve()
    except (OSError, ValueError):  # of what is not a path
        return False


def read_record(folder: Path) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The record of a start, and the configuration flat, by names such as ``model.num_layers``;
    what is missing or broken is None or empty."""
    record, configuration = _read(folder / "record.json"), _read(folder / "config.json")
    return record, dict(_flat(configuration or {}))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = parse_json(read_regular(path), str(path), lenient=True)
        orjson.dumps(content)  # as the page gets it, which takes no numbers beyond 64 bits
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, dict) and value:
            rows += _flat(value, f"{prefix}{name}.")
        else:
            rows.append((prefix + name, value))
    return rows
