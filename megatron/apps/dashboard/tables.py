"""Tables of metrics, stored as one growing file per column, and curves from them. Curves are
smoothed over all rows, and thinned without losing spikes."""

from __future__ import annotations

import math
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

# Clocks that each row contains, with their keys in the metrics file.
CLOCKS = {"iteration": "iteration", "samples": "consumed_samples", "tokens": "consumed_tokens"}
MOST_COLUMNS = 400
LONGEST_NAME = 200  # maximum length of the name of a kind or column
_SHOWN = {source: clock for clock, source in CLOCKS.items()}
_BYTES = 8
_RARE = 8
_NUMBERS = frozenset({int, float, bool, type(None)})
_ABSENT = np.uint64(0x7FF8_0000_0000_0000)
"""Bits of NaN. Values are XORed with them in files, so that a range without values is all zeros,
which a file system can store without using space."""


class MetricTableState(NamedTuple):
    """State of a table, without its column files."""

    kind: str
    rows: int
    columns: list[str]


class MetricTable:
    """Rows of one kind, with NaN where a row lacks a value. Raises OSError if a file cannot be
    written, and ValueError if a file is shorter than ``state`` requires.

    Args:
        folder: folder of the column files.
        number: number of the table in its index, which is a prefix of its file names.
        state: stored state of the table. Rows beyond its count, written by a process that ended
            before saving, are truncated.

    Attributes:
        left_out: number of values under names beyond the limits.
    """

    def __init__(self, folder: Path, number: int, state: MetricTableState) -> None:
        self._folder, self._number = folder, number
        self.kind, self.rows, self.columns = state.kind, state.rows, list(state.columns)
        self.left_out = 0
        self._waiting: list[Mapping[str, Any]] = []
        self._dropped: dict[str, None] = {}
        """Names in rows that were dropped before they were written. They get columns, as if the
        rows had been written first."""
        self._tops: array[float] | None = None
        """Largest step up to each row, including rows that are not written yet. The sequence is
        sorted, so that the start of repeated steps can be found by bisection."""
        for place in range(len(self.columns)):
            path = self._path(place)
            if os.path.getsize(path) < self.rows * _BYTES:
                raise ValueError(f"{path} is shorter than its index says")
        self.cut(self.rows)

    @property
    def state(self) -> MetricTableState:
        """State from which :class:`MetricTable` can open the table again."""
        return MetricTableState(self.kind, self.rows, self.columns)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row of a metrics file. It is written by :meth:`flush`."""
        tops, step = self._known_tops(), row["iteration"]
        tops.append(step if not tops or step > tops[-1] else tops[-1])
        self._waiting.append(row)

    def flush(self, room: int = MOST_COLUMNS) -> None:
        """Write the pending rows, adding at most ``room`` new columns. Values that are not numbers
        count as missing."""
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
        """Keep only the first ``rows`` written rows."""
        for place in range(len(self.columns)):
            os.truncate(self._path(place), rows * _BYTES)
        self.rows = rows

    def cut_from(self, step: int) -> None:
        """Drop all rows from the first one whose step is at least ``step``."""
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
        """Return the values of all written rows, or of the ``last`` ones. An unknown name gives
        NaN."""
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
    """Return the row numbers and values of names that occur in few rows, in one pass over the
    rows."""
    entries: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
    for place, row in enumerate(rows if names else ()):
        for name in names.intersection(row):
            entries[name].append((place, _number(row[name])))
    return entries


def _numbers(values: list[Any]) -> Column:
    if _NUMBERS.issuperset(map(type, values)):  # because NumPy would also convert lists and strings
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


class Curve(NamedTuple):
    """Points of a curve. NaN is a gap."""

    x: Column
    y: Column


def training_seconds(train: MetricTable | None) -> Curve:
    """Return the cumulative training time in seconds over the steps. The curve is empty if the rows
    contain no times."""
    if train is None or not train.rows or "seconds_per_iteration" not in train.columns:
        return Curve(np.empty(0), np.empty(0))
    steps = train.column("iteration")
    each = np.nan_to_num(train.column("seconds_per_iteration"))
    counts = np.diff(steps, prepend=0.0)
    # The file of a resumed run may start at a late step. Its first row is assumed to cover as many
    # steps as the second.
    counts[0] = min(counts[:2])
    return Curve(steps, np.cumsum(each * counts))


def power(energy: Column, seconds: Curve) -> Column:
    """Return the mean power in watts between each training row and the previous one, computed from
    the cumulative energy. It is NaN for the first row, and where the energy counter was reset."""
    with np.errstate(divide="ignore", invalid="ignore"):
        watts = np.diff(energy, prepend=np.nan) / np.diff(seconds.y, prepend=np.nan)
    return np.where((watts >= 0) & np.isfinite(watts), watts, np.nan)


def clock(name: str, table: MetricTable, seconds: Curve) -> Column:
    """Return the positions of a table's rows on the axis ``name``: iteration, samples, tokens, or
    the training time in seconds."""
    if name != "seconds":
        return table.column(name)
    if not len(seconds.x):
        return np.full(table.rows, np.nan)
    if table.kind == "train":
        return seconds.y
    return np.interp(table.column("iteration"), *seconds)


def rising(x: Column, y: Column) -> Curve:
    """Return the points with a finite position, sorted. Of points with equal positions, the last is
    kept."""
    known = np.isfinite(x)
    if not known.all():
        x, y = x[known], y[known]
    if len(x) > 1 and not (np.diff(x) > 0).all():
        order = np.argsort(x, kind="stable")
        x, y = x[order], y[order]
        last = np.append(np.diff(x) > 0, True)
        x, y = x[last], y[last]
    return Curve(x, y)


def smoothed(curve: Curve, factor: float) -> Curve:
    """Return the exponential moving average of a curve. Each value has ``factor`` (0 to 1) times
    the weight of the next value, and the weights are normalised. Gaps are left out."""
    known = np.isfinite(curve.y)
    x, y = curve.x[known], curve.y[known]
    if not len(y) or factor <= 0:
        return Curve(x, y)
    # Blocks are so short that powers of the factor stay in range, and so long that only the
    # previous block still has a noticeable weight.
    length = max(1, min(len(y), int(math.log(1e-12) / math.log(factor))))
    blocks = -(-len(y) // length)
    filled = np.zeros(blocks * length)
    filled[: len(y)] = y
    powers = factor ** np.arange(length)
    sums = np.cumsum(filled.reshape(blocks, length) / powers, axis=1) * powers * (1 - factor)
    carried = np.append(0.0, sums[:-1, -1])
    mean = (sums + carried[:, None] * (powers * factor)).ravel()[: len(y)]
    weights = -np.expm1(np.arange(1, len(y) + 1) * math.log(factor))
    return Curve(x, mean / weights)


def part(curve: Curve, first: float | None, last: float | None) -> Curve:
    """Return the points from ``first`` to ``last``, and one more on either side, so that lines
    extend to the edges of the chart."""
    begin = 0 if first is None else int(np.searchsorted(curve.x, first, "left")) - 1
    end = len(curve.x) if last is None else int(np.searchsorted(curve.x, last, "right")) + 1
    return Curve(*(values[max(0, begin) : end] for values in curve))


def thinned(curve: Curve, points: int) -> Curve:
    """Return about ``points`` points of a curve: the minimum and maximum of equal intervals, so
    that no spike is lost, and the first and last point."""
    count = len(curve.x)
    if count <= max(points, 4):
        return curve
    size = -(-count // max(1, points // 2))
    parts = -(-count // size)
    known = np.isfinite(curve.y)
    chosen: list[NDArray[np.intp]] = [np.array([0, count - 1])]
    offsets = np.arange(parts) * size
    for worst, least in ((np.inf, True), (-np.inf, False)):
        filled = np.full(parts * size, worst)
        filled[:count] = np.where(known, curve.y, worst)
        table = filled.reshape(parts, size)
        places = (table.argmin(1) if least else table.argmax(1)) + offsets
        chosen.append(places[places < count])
    index = np.unique(np.concatenate(chosen))
    return Curve(curve.x[index], curve.y[index])
