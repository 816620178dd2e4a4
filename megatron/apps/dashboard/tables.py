"""Numbers of many rows in columns, each a file that grows."""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]

CLOCKS = {"iteration": "iteration", "samples": "consumed_samples", "tokens": "consumed_tokens"}
"""The clocks of every row, and their names in it."""
MOST_COLUMNS = 400
LONGEST_NAME = 200
"""Characters of a kind or a column."""
_SHOWN = {source: clock for clock, source in CLOCKS.items()}
_BYTES = 8
_RARE = 8
_NUMBERS = frozenset({int, float, bool, type(None)})
_ABSENT = np.uint64(0x7FF8_0000_0000_0000)
"""NaN, with which the bits of values are combined in files: a piece without values is all zeros,
for which a file system needs no room."""


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

    Attributes:
        left_out: values of names for which there was no room.

    Raises OSError if files cannot be written; ValueError if they are shorter than the state says.
    """

    def __init__(self, folder: Path, number: int, state: MetricTableState) -> None:
        self._folder, self._number = folder, number
        self.kind, self.rows, self.columns = state.kind, state.rows, list(state.columns)
        self.left_out = 0
        self._waiting: list[Mapping[str, Any]] = []
        self._dropped: dict[str, None] = {}
        """Names of rows that became void while they waited: the columns are the same as if they had
        been written before."""
        self._tops: array[float] | None = None
        """The greatest step up to each row, those that wait included: where steps that are computed
        again begin is looked up, and not searched for."""
        for place in range(len(self.columns)):
            path = self._path(place)
            if os.path.getsize(path) < self.rows * _BYTES:
                raise ValueError(f"{path} is shorter than its index says")
        self.cut(self.rows)

    @property
    def state(self) -> MetricTableState:
        """What :class:`MetricTable` opens it with again."""
        return MetricTableState(self.kind, self.rows, self.columns)

    def add(self, row: Mapping[str, Any]) -> None:
        """Takes a row of a file of metrics, which :meth:`flush` writes."""
        tops, step = self._known_tops(), row["iteration"]
        tops.append(step if not tops or step > tops[-1] else tops[-1])
        self._waiting.append(row)

    def flush(self, room: int = MOST_COLUMNS) -> None:
        """Writes the rows that wait, with at most ``room`` further columns; what is not a number
        counts as absent."""
        if not self._waiting and not self._dropped:
            return
        rows, self._waiting = self._waiting, []
        counts = Counter(chain(("iteration",), self._dropped, *rows))
        self._dropped = {}
        values = {_SHOWN.get(name, name): name for name in counts if name != "kind"}
        present = set(self.columns)
        further = [name for name in values if name not in present]
        room = max(not present, min(room, MOST_COLUMNS - len(present)))
        fitting = [name for name in further if len(name) <= LONGEST_NAME][:room]
        if left := {values[name] for name in set(further).difference(fitting)}:
            self.left_out += sum(len(left.intersection(row)) for row in rows)
        for name in fitting:
            path = self._path(len(self.columns))
            path.write_bytes(b"")
            os.truncate(path, self.rows * _BYTES)
            self.columns.append(name)
        kept = {values[name] for name in self.columns if name in values}
        few = _entries(rows, {name for name in kept if _RARE * counts[name] < len(rows)})
        for place, name in enumerate(self.columns):
            source = values.get(name, name)
            numbers = np.full(len(rows), np.nan)
            if source in few:
                for row, value in few[source]:
                    numbers[row] = value
            elif source in kept:
                numbers = _numbers([row.get(source) for row in rows])
            self._write(place, numbers)
        self.rows += len(rows)

    def cut(self, rows: int) -> None:
        """Keeps the first rows, of those that are written."""
        for place in range(len(self.columns)):
            os.truncate(self._path(place), rows * _BYTES)
        self.rows = rows

    def cut_from(self, step: int) -> None:
        """Drops the rows from the first one on whose step is ``step`` or later."""
        if not self.rows and not self._waiting:
            return
        tops = self._known_tops()
        keep = bisect_left(tops, step)
        if keep == len(tops):
            return
        del tops[keep:]
        for row in (dropped := self._waiting[max(0, keep - self.rows) :]):
            self._dropped.update(dict.fromkeys(row))
        del self._waiting[len(self._waiting) - len(dropped) :]
        if keep < self.rows:
            self.cut(keep)

    def column(self, name: str, last: int | None = None) -> Column:
        """The values of all rows, or of the ``last``; NaN for a name that no row has."""
        count = self.rows if last is None else min(last, self.rows)
        if name not in self.columns:
            return np.full(count, np.nan)
        path, offset = self._path(self.columns.index(name)), (self.rows - count) * _BYTES
        bits = np.fromfile(path, np.uint64, count, offset=offset)
        return (bits ^ _ABSENT).view(np.float64)

    def _known_tops(self) -> array[float]:
        if self._tops is None:
            steps = np.maximum.accumulate(np.nan_to_num(self.column("iteration")))
            self._tops = array("d", steps.tobytes())
        return self._tops

    def _write(self, place: int, values: Column) -> None:
        path = self._path(place)
        if np.isnan(values).all():
            os.truncate(path, (self.rows + len(values)) * _BYTES)
            return
        with path.open("ab") as file:
            file.write((values.view(np.uint64) ^ _ABSENT).tobytes())

    def _path(self, place: int) -> Path:
        return self._folder / f"{self._number}-{place}.f64"


def _entries(
    rows: Sequence[Mapping[str, Any]], names: set[str]
) -> dict[str, list[tuple[int, float]]]:
    """Rows and values of names that few of the rows have, in one pass over these."""
    entries: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
    for place, row in enumerate(rows if names else ()):
        for name in names.intersection(row):
            entries[name].append((place, _number(row[name])))
    return entries


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
