"""What a run's folder says of it besides its metrics: how it was started, and its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.util.files import read_regular
from megatron.util.json_text import parse_json

_LEVELS = ("", "*/", "*/*/")
"""Folders below that of the metrics in which a record may be: the checkpoints' is often one."""


def newest_record(metrics: Path) -> Path | None:
    """The folder of the last start's record near a file of metrics, None if nothing is there."""
    for level in _LEVELS:
        found = sorted(metrics.parent.glob(f"{level}run/[0-9]*/record.json"))
        if found:
            return max((path.parent for path in found), key=lambda folder: int(folder.name))
    return None


def read_record(folder: Path) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The record of a start, and the configuration flat, by names such as ``model.num_layers``;
    what is missing or broken is None or empty."""
    record, configuration = _read(folder / "record.json"), _read(folder / "config.json")
    return record, dict(_flat(configuration or {}))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = parse_json(read_regular(path), str(path), lenient=True)
    except (OSError, ValueError):
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
