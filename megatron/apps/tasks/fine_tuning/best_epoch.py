"""The record of a fine-tuning's epochs, and which of them is the best.

It is the file ``best_epoch.json`` beside the checkpoints. Its ``checkpoint`` is kept, whatever
``--keep-last`` says: :func:`megatron.checkpoint.folder.superseded` reads it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.folder import BEST, tag
from megatron.config import ConfigError
from megatron.util.files import write_whole
from megatron.util.json_text import parse_json


@dataclass(frozen=True)
class EpochRecord:
    """The scores of an epoch, counted from 0, after ``iteration`` steps: the one that compares
    epochs, over all validation sets together, and those of each set."""

    epoch: int
    iteration: int
    metric: str
    value: float
    sets: Mapping[str, Mapping[str, float]]


class EpochRecords:
    """The records so far. ``save`` is the folder of the checkpoints, None without; ``writes``
    whether this process writes the file. Raises ConfigError if the file of an earlier run cannot be
    read."""

    def __init__(self, save: Path | None, writes: bool) -> None:
        self._path = None if save is None else save / BEST
        self._writes = writes
        self.records: list[EpochRecord] = []
        if self._path is not None and self._path.is_file():
            try:
                found = parse_json(self._path.read_bytes(), str(self._path), lenient=True)["epochs"]
                self.records = [_record(content) for content in found]
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ConfigError(
                    f"{self._path} cannot be read; delete it, and the best epoch is found among "
                    "those that follow"
                ) from None

    @property
    def best(self) -> EpochRecord | None:
        """The first epoch with the highest value; one that is not a number is below all others."""
        return max(self.records, key=_comparable, default=None)

    def has(self, epoch: int) -> bool:
        return any(record.epoch == epoch for record in self.records)

    def forget_after(self, iteration: int) -> None:
        """Drops the records of later epochs, which the run trains again."""
        self.records = [record for record in self.records if record.iteration <= iteration]

    def add(self, record: EpochRecord) -> None:
        """Adds an epoch, in place of an earlier record of it, and writes the file."""
        self.records = [each for each in self.records if each.epoch != record.epoch]
        self.records.append(record)
        best = self.best
        assert best is not None
        if self._path is None or not self._writes:
            return
        content = {
            "epoch": best.epoch,
            "iteration": best.iteration,
            "checkpoint": tag(best.iteration),
            "metric": best.metric,
            "value": _json_number(best.value),
            "epochs": [_json(record) for record in self.records],
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._path, (json.dumps(content, indent=2) + "\n").encode())


def _comparable(record: EpochRecord) -> float:
    return -math.inf if math.isnan(record.value) else record.value


def _record(content: Mapping[str, Any]) -> EpochRecord:
    sets = {
        name: {metric: _number(value) for metric, value in metrics.items()}
        for name, metrics in content["sets"].items()
    }
    return EpochRecord(**{**content, "value": _number(content["value"]), "sets": sets})


def _json(record: EpochRecord) -> dict[str, object]:
    sets = {
        name: {metric: _json_number(value) for metric, value in metrics.items()}
        for name, metrics in record.sets.items()
    }
    return asdict(record) | {"value": _json_number(record.value), "sets": sets}


def _json_number(value: float) -> float | None:
    """JSON has no NaN: it is null there."""
    return value if math.isfinite(value) else None


def _number(value: float | None) -> float:
    """What `_json_number` wrote."""
    return math.nan if value is None else float(value)
