"""Numbers of many rows in columns, each a file that grows, and curves of them: smoothed over all
rows, thinned so that spikes stay."""

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

# The clocks of every row, and their names in it.
CLOCKS = {"iteration": "iteration", "samples": "consumed_samples", "tokens": "consumed_tokens"}
MOST_COLUMNS = 400
LONGEST_NAME = 200  # characters of a kind or a column
_SHOWN = {source: clock for clock, source in CLOCKS.items()}
_BYTES = 8
_RARE = 8
_NUMBERS = frozenset({int, float, bool, type(None)})
_ABSENT = np.uint64(0x7FF8_0000_0000_0000)
"""NaN, with which the bits of values are combined in files: a piece without values is all zeros,
for which a file system needs no room."""


class MetricTableState(NamedTuple):
    """The description of a table besides its files."""

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
        """The greatest step up to each row, including rows not yet written: the start of repeated
        steps is looked up instead of searched for."""
        for place in range(len(self.columns)):
            path = self._path(place)
            if os.path.getsize(path) < self.rows * _BYTES:
                raise ValueError(f"{path} is shorter than its index says")
        self.cut(self.rows)

    @property
    def state(self) -> MetricTableState:
        """Description with which :class:`MetricTable` opens it again."""
        return MetricTableState(self.kind, self.rows, self.columns)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row of a file of metrics, which :meth:`flush` writes."""
        tops, step = self._known_tops(), row["iteration"]
        tops.append(step if not tops or step > tops[-1] else tops[-1])
        self._waiting.append(row)

    def flush(self, room: int = MOST_COLUMNS) -> None:
        """Write the rows that wait, with at most ``room`` further columns; values that are not
        numbers are treated as absent."""
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
        """Keep the first of the written rows."""
        for place in range(len(self.columns)):
            os.truncate(self._path(place), rows * _BYTES)
        self.rows = rows

    def cut_from(self, step: int) -> None:
        """Drop the rows from the first whose step is ``step`` or later."""
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
        """Return the values of all rows, or of the ``last``; NaN for a name that no row has."""
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
    """Return rows and values of names that few of the rows have, in one pass."""
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


class Curve(NamedTuple):
    """Points; NaN is a gap."""

    x: Column
    y: Column


def training_seconds(train: MetricTable | None) -> Curve:
    """Return the seconds that training took, over its steps; no points if the rows do not say."""
    if train is None or not train.rows or "seconds_per_iteration" not in train.columns:
        return Curve(np.empty(0), np.empty(0))
    steps = train.column("iteration")
    each = np.nan_to_num(train.column("seconds_per_iteration"))
    counts = np.diff(steps, prepend=0.0)
    # A file of a resumed run may begin late; its first row covers as many steps as the others.
    counts[0] = min(counts[:2])
    return Curve(steps, np.cumsum(each * counts))


def power(energy: Column, seconds: Curve) -> Column:
    """Return the watts between each row of training and the one before it, from the energy used so
    far; NaN for the first, and where a counter began again."""
    with np.errstate(divide="ignore", invalid="ignore"):
        watts = np.diff(energy, prepend=np.nan) / np.diff(seconds.y, prepend=np.nan)
    return np.where((watts >= 0) & np.isfinite(watts), watts, np.nan)


def clock(name: str, table: MetricTable, seconds: Curve) -> Column:
    """Return the positions of the rows of a table on the axis ``name``: their iteration, samples or
    tokens, or the seconds that training took until then."""
    if name != "seconds":
        return table.column(name)
    if not len(seconds.x):
        return np.full(table.rows, np.nan)
    if table.kind == "train":
        return seconds.y
    return np.interp(table.column("iteration"), *seconds)


def rising(x: Column, y: Column) -> Curve:
    """Return the points whose position is known, each once and in order; of equal ones the last."""
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
    """Return the exponential mean of a curve, each value weighing ``factor`` (0 to 1) of the one
    after it, divided by the sum of the weights. Gaps are left out."""
    known = np.isfinite(curve.y)
    x, y = curve.x[known], curve.y[known]
    if not len(y) or factor <= 0:
        return Curve(x, y)
    # Within a block powers of the factor stay in range; of what was before it only the block
    # before still weighs something.
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
    """Return the points from ``first`` to ``last``, with one more on either side, to which lines
    lead."""
    begin = 0 if first is None else int(np.searchsorted(curve.x, first, "left")) - 1
    end = len(curve.x) if last is None else int(np.searchsorted(curve.x, last, "right")) + 1
    return Curve(*(values[max(0, begin) : end] for values in curve))


def thinned(curve: Curve, points: int) -> Curve:
    """Return about ``points`` of the points: the least and the greatest of each of equal parts, so
    that no spike is lost, and the first and last of all."""
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
