"""Numbers of many rows in columns, each a file that grows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]

CLOCKS = {"iteration": "iteration", "samples": "consumed_samples", "tokens": "consumed_tokens"}
"""The clocks of every row, and their names in it."""
MOST_COLUMNS = 400
_BYTES = 8
_NUMBERS = frozenset({int, float, bool, type(None)})


class MetricTableState(NamedTuple):
    """What is known of a table besides its files."""

    kind: str
    rows: int
    columns: list[str]


class MetricTable:
    """The rows of one kind; NaN where a row lacks a value.

    Args:
        folder: of the files.
        number: of the table in its index; names of files begin with it.
        state: rows beyond those it counts were written when a process ended, and are cut off.

    Raises OSError if files cannot be written; ValueError if they are shorter than the state says.
    """

    def __init__(self, folder: Path, number: int, state: MetricTableState) -> None:
        self._folder, self._number = folder, number
        self.kind, self.rows, self.columns = state.kind, state.rows, list(state.columns)
        for place in range(len(self.columns)):
            path = self._path(place)
            if os.path.getsize(path) < self.rows * _BYTES:
                raise ValueError(f"{path} is shorter than its index says")
        self.cut(self.rows)

    @property
    def state(self) -> MetricTableState:
        """What :class:`MetricTable` opens it with again."""
        return MetricTableState(self.kind, self.rows, self.columns)

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds rows of a file of metrics; what is not a number counts as absent."""
        names = dict.fromkeys(name for row in rows for name in row)
        shown = {source: clock for clock, source in CLOCKS.items()}
        found = {
            shown.get(name, name): _numbers([row.get(name) for row in rows])
            for name in names
            if name != "kind"
        }
        for name in found:
            if name not in self.columns and len(self.columns) < MOST_COLUMNS:
                self._write(len(self.columns), np.full(self.rows, np.nan), "wb")
                self.columns.append(name)
        absent = np.full(len(rows), np.nan)
        for place, name in enumerate(self.columns):
            self._write(place, found.get(name, absent))
        self.rows += len(rows)

    def cut(self, rows: int) -> None:
        """Keeps the first rows."""
        for place in range(len(self.columns)):
            os.truncate(self._path(place), rows * _BYTES)
        self.rows = rows

    def cut_from(self, step: int) -> None:
        """Drops the rows from the first one on whose step is ``step`` or later."""
        later = np.flatnonzero(self.column("iteration") >= step)
        if len(later):
            self.cut(int(later[0]))

    def column(self, name: str, last: int | None = None) -> Column:
        """The values of all rows, or of the ``last``; NaN for a name that no row has."""
        count = self.rows if last is None else min(last, self.rows)
        if name not in self.columns:
            return np.full(count, np.nan)
        path, offset = self._path(self.columns.index(name)), (self.rows - count) * _BYTES
        return np.fromfile(path, np.float64, count, offset=offset)

    def _write(self, place: int, values: Column, mode: str = "ab") -> None:
        with self._path(place).open(mode) as file:
            file.write(values.tobytes())

    def _path(self, place: int) -> Path:
        return self._folder / f"{self._number}-{place}.f64"


def _numbers(values: list[Any]) -> Column:
    if _NUMBERS.issuperset(map(type, values)):  # lists and text would be converted as well
        try:
            return np.array(values, dtype=np.float64)
        except OverflowError:
            pass
    return np.array([_number(value) for value in values], dtype=np.float64)


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else np.nan
    except OverflowError:
        return np.nan
