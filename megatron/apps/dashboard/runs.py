"""Runs of the dashboard: each run has an index of its metrics, and answers queries about them."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.apps.dashboard.index import RunIndex
from megatron.apps.dashboard.records import StartNotes, newest_record, read_record
from megatron.apps.dashboard.tables import (
    CLOCKS,
    Column,
    Curve,
    MetricTable,
    clock,
    part,
    power,
    rising,
    smoothed,
    thinned,
    training_seconds,
)
from megatron.util.errors import one_line

AXES = (*CLOCKS, "seconds")
METRICS = "metrics.jsonl"
POWER = "power_watts"
_DRAWN = frozenset({"train", "validation", "test", "task"})
_SAVES = frozenset({"save", "memory_save"})
_MOST_EVENTS = 2000
# A run is no longer shown as live if it has no new row for the longer of these times.
_QUIET_SECONDS, _QUIET_STEPS = 600.0, 10
_PLAN = "the end of its plan"
_INTERRUPTS = frozenset({"KeyboardInterrupt", "SystemExit"})
MOST_CELLS = 1 << 22  # maximum number of rows x series of a table
_LOOK_SECONDS = 20.0
_RETRY_SECONDS = 2.0
# maximum number of rows averaged for the table of runs; short runs use a twentieth of their rows
_RECENT = 100


class WatchedRun:
    """Run shown by the dashboard, with its id in URLs and its name. Thread-safe. Raises OSError if
    the metrics file cannot be read."""

    def __init__(self, id: str, name: str, path: Path) -> None:
        self.id, self.name, self.path = id, name, path
        self._index = RunIndex(path)
        self._lock = threading.RLock()
        self._progress: float | None = 0.0
        self._error: str | None = None
        self._start = StartNotes(None, {}, [])
        self._look_at, self._looked_in, self._retry_at = 0.0, -1, 0.0
        self._time: tuple[str, Curve] = "", training_seconds(None)
        self._last: tuple[str, dict[str, float] | None] = "", None

    def refresh(self, ended: Callable[[], bool] = lambda: False) -> None:
        """Read the rows written since the last call. Stops early once ``ended`` returns True. An
        unreadable file does not raise, but sets the run's error."""
        if time.monotonic() < self._retry_at:
            return
        try:
            pieces, whole = self._index.update(self._told), False
            while not (whole or ended()):
                with self._lock:
                    whole = next(pieces, self) is self
            with self._lock:
                pieces.close()
            if time.monotonic() >= self._look_at or self._index.generation != self._looked_in:
                self._look()
            self._error = None
            if self._index.lines and self._index.broken == self._index.lines:
                self._error = (
                    f"none of the {self._index.lines:,} lines of {self.path.name} is a row of "
                    "metrics, which a run writes with --metrics-file"
                )
            if whole:
                self._progress = None
        except OSError as error:
            self.failed(error.strerror or str(error))

    def failed(self, words: str) -> None:
        """Set an error, which remains until a later read succeeds."""
        self._error = one_line(f"cannot be read: {words}")
        self._progress = None
        self._retry_at = time.monotonic() + _RETRY_SECONDS

    def _look(self) -> None:
        """Read the record of the last start. Called at intervals, not at every refresh."""
        if (folder := newest_record(self.path)) is not None:
            start = read_record(folder)
            with self._lock:
                self._start = start
        self._look_at = time.monotonic() + _LOOK_SECONDS
        # a new start of the run may replace the metrics file
        self._looked_in = self._index.generation

    def close(self) -> None:
        """Release the index, so that another process can use it."""
        with self._lock:
            self._index.close()

    def listing(self) -> dict[str, Any]:
        """Return the run's entry in the list of runs."""
        with self._lock:
            state, words = self._state()
            return {
                "id": self.id,
                "name": self.name,
                "path": _shown_name(str(self.path)),
                "state": state,
                "words": words,
                "progress": self._progress,
                "error": self._error,
                "rows": self._index.lines - self._index.broken,
                "broken": self._index.broken,
                "left_out": [*self._index.notes, *self._start.left_out],
                "planned": self._planned,
                "version": f"{self._index.version} {len(self._start.configuration)} {state}",
                "last": self._newest(),
            }

    def summary(self) -> dict[str, Any]:
        """Return everything about the run that :meth:`listing` lacks, except the points of its
        curves."""
        with self._lock:
            tables = self._index.tables
            train = tables.get("train")
            ends = [] if train is None or not train.rows else self._ends(train)
            events, count = self._events()
            return {
                "extent": {
                    name: [end[name] for end in ends] for name in AXES if ends and name in ends[1]
                },
                "series": [
                    {"id": f"{number}-{name}", "kind": table.kind, "name": name}
                    for number, table in enumerate(tables.values())
                    if table.kind.partition(" ")[0] in _DRAWN or table.kind in _SAVES
                    for name in (*table.columns, *self._derived(table))
                    if name not in CLOCKS
                ],
                "events": events,
                "event_count": count,
                "totals": self._totals(),
                "configuration": self._start.configuration,
                "record": self._start.record,
            }

    def series(
        self,
        ids: Sequence[str],
        axis: str,
        first: float | None,
        last: float | None,
        points: int,
        factor: float,
    ) -> dict[str, Any]:
        """Return curves over ``axis`` from ``first`` to ``last``, each with about ``points``
        points. Training curves are accompanied by a smoothed curve unless ``factor`` is 0. Raises
        KeyError for an unknown id."""
        curves: dict[str, Any] = {}
        for id in ids:
            with self._lock:
                table, name = self._series(id)
                curve = rising(clock(axis, table, self._seconds()), self._column(table, name))
            curves[id] = _shown(thinned(part(curve, first, last), points))
            if factor and table.kind == "train":
                mean = part(smoothed(curve, factor), first, last)
                curves[id]["smooth"] = _shown(thinned(mean, points))
        return curves

    def positions(self, points: int) -> dict[str, Column]:
        """Return about ``points`` positions of the training so far, as one array per axis."""
        with self._lock:
            train = self._index.tables.get("train")
            if train is None or not train.rows:
                return {name: np.empty(0) for name in AXES}
            chosen = np.unique(np.linspace(0, train.rows - 1, min(points, train.rows)).astype(int))
            return {name: clock(name, train, self._seconds())[chosen] for name in AXES}

    def table(
        self, ids: Sequence[str], axis: str, first: float | None, last: float | None
    ) -> Iterator[str]:
        """Yield the lines of a CSV file with the rows from ``first`` to ``last`` that have at least
        one of the requested values. Raises KeyError for an unknown id, and OverflowError if the
        table is too large."""
        with self._lock:
            parts = []
            for table, name in (self._series(id) for id in dict.fromkeys(ids)):
                x = clock(axis, table, self._seconds())
                inside = np.isfinite(x)
                inside &= x >= (-math.inf if first is None else first)
                inside &= x <= (math.inf if last is None else last)
                heading = name if table.kind == "train" else f"{table.kind} {name}"
                columns = [self._column(table, each)[inside] for each in (*CLOCKS, name)]
                parts.append((heading, columns))
                if len(parts) * sum(len(columns[0]) for _, columns in parts) > MOST_CELLS:
                    raise OverflowError(
                        f"the table has more than {MOST_CELLS:,} values: choose a part with from "
                        "and to, or fewer series"
                    )
        steps = np.unique(np.concatenate([np.empty(0), *(columns[0] for _, columns in parts)]))
        rows = np.full((len(steps), len(CLOCKS) + len(parts)), np.nan)
        rows[:, 0] = steps
        for place, (_, columns) in reversed(list(enumerate(parts, len(CLOCKS)))):
            at = np.searchsorted(steps, columns[0])
            rows[at, 1], rows[at, 2], rows[at, place] = columns[1:]
        yield ",".join((*CLOCKS, *(_field(heading) for heading, _ in parts))) + "\n"
        for row in rows:
            counts, values = row[: len(CLOCKS)].tolist(), row[len(CLOCKS) :].tolist()
            yield ",".join((*(_cell(n, whole=True) for n in counts), *map(_cell, values))) + "\n"

    def texts(self) -> list[dict[str, Any]]:
        """Return texts generated by the model during training."""
        return self._index.texts

    def _told(self, share: float) -> None:
        if self._progress is not None:
            self._progress = share

    @property
    def _planned(self) -> int | None:
        if self._start.configuration.get("training.train_tokens") is not None:
            return None  # the number of tokens may end the run earlier
        planned = self._start.configuration.get("training.train_iters")
        return planned if type(planned) is int and 0 < planned < 1 << 53 else None

    def _state(self) -> tuple[str, str]:
        """Return the run's state and a description of it. A run that ends normally records this,
        whereas a killed run just stops writing."""
        if self._error is not None or self._progress is not None:
            return ("error", "not readable") if self._error is not None else ("loading", "reading")
        record = self._start.record or {}
        if record.get("ended"):
            end = record.get("end") or ""
            error, colon, _ = end.partition(": ")
            failed = bool(colon) and error.isidentifier() and error not in _INTERRUPTS
            state = "finished" if end in ("", _PLAN) else "failed" if failed else "stopped"
            return state, one_line(f"{state}: {end}"[:300] if state != "finished" else state)
        try:
            quiet = time.time() - self.path.stat().st_mtime
        except OSError:
            return "quiet", "its file is gone"
        train = self._index.tables.get("train")
        each = None if train is None else _last(train.column("seconds_per_iteration", 1))
        if quiet < max(_QUIET_SECONDS, _QUIET_STEPS * (each or 0.0)):
            return "live", "running"
        last = self._newest()
        if last is not None and self._planned and last.get("iteration", 0) >= self._planned:
            return "finished", "finished"
        return "quiet", f"no rows for {_rough(quiet)}"

    def _series(self, id: str) -> tuple[MetricTable, str]:
        number, _, name = id.partition("-")
        tables = list(self._index.tables.values())
        if not number.isdecimal() or int(number) >= len(tables):
            raise KeyError(id)
        table = tables[int(number)]
        if name not in (*table.columns, *self._derived(table)) or name in CLOCKS:
            raise KeyError(id)
        return table, name

    def _derived(self, table: MetricTable) -> tuple[str, ...]:
        """Return the names of series that are computed from several columns."""
        measured = {"energy_joules", "seconds_per_iteration"}.issubset(table.columns)
        return (POWER,) if table.kind == "train" and measured else ()

    def _column(self, table: MetricTable, name: str) -> Column:
        if name != POWER or name in table.columns:
            return table.column(name)
        return power(table.column("energy_joules"), self._seconds())

    def _newest(self) -> dict[str, float] | None:
        """Return the latest position of the run on each axis, or None before the first row."""
        version, ends = self._last
        if version != self._index.version:
            train = self._index.tables.get("train")
            ends = None if train is None or not train.rows else self._ends(train)[1]
            self._last = self._index.version, ends
        return ends

    def _ends(self, train: MetricTable) -> list[dict[str, float]]:
        """Return the positions of the first and the last training row on each axis."""
        ends: list[dict[str, float]] = [{}, {}]
        for name in AXES:
            column = clock(name, train, self._seconds())
            for end, value in zip(ends, (column[0], column[-1]), strict=True):
                if math.isfinite(value):
                    end[name] = float(value)
        return ends

    def _seconds(self) -> Curve:
        """Return the elapsed training time as a curve over the steps. Many curves need it, so it is
        computed only once per version of the index."""
        version, seconds = self._time
        if version != self._index.version:
            seconds = training_seconds(self._index.tables.get("train"))
            self._time = self._index.version, seconds
        return seconds

    def _events(self) -> tuple[list[dict[str, Any]], int]:
        """Return the latest events and the total number of events."""
        tables = [
            table
            for table in self._index.tables.values()
            if table.kind.partition(" ")[0] not in _DRAWN and table.rows
        ]
        count = sum(table.rows for table in tables)
        ends = [table.column("iteration", _MOST_EVENTS) for table in tables]
        steps = np.concatenate([np.empty(0), *ends])
        latest = np.zeros(len(steps), bool)
        latest[np.argsort(steps, kind="stable")[-_MOST_EVENTS:]] = True
        borders = np.cumsum([0, *map(len, ends)])
        events: list[dict[str, Any]] = []
        for table, end, border in zip(tables, ends, borders[:-1], strict=True):
            chosen = np.flatnonzero(latest[border : border + len(end)])
            if not len(chosen):
                continue
            clocks = {
                name: clock(name, table, self._seconds())[-len(end) :][chosen].tolist()
                for name in AXES
            }
            rows = [
                {"kind": table.kind, **dict(zip(AXES, values, strict=True)), "values": {}}
                for values in zip(*clocks.values(), strict=True)
            ]
            for name in table.columns:
                if name not in CLOCKS:
                    column = table.column(name, len(end))[chosen]
                    for place in np.flatnonzero(~np.isnan(column)).tolist():
                        rows[place]["values"][name] = float(column[place])
            events += rows
        return sorted(events, key=lambda event: event["iteration"]), count

    def _totals(self) -> dict[str, float | None]:
        tables = self._index.tables
        train = tables.get("train")
        if train is None or not train.rows:
            return {}
        recent = max(1, min(_RECENT, train.rows // 20))
        seconds = self._seconds().y[-_RECENT:]
        tokens = train.column("tokens", _RECENT)
        rate = None
        if len(seconds) > 1 and seconds[-1] > seconds[0]:
            rate = float((tokens[-1] - tokens[0]) / (seconds[-1] - seconds[0]))
        held_out, test = (
            next((t for k, t in tables.items() if k.partition(" ")[0] == family and t.rows), None)
            for family in ("validation", "test")
        )
        names = ("seconds_left", "energy_joules", "co2_grams", "cost", "cost_left")
        return {
            "reward": _finite(train.column("reward", recent), np.mean),
            "loss": _finite(train.column("loss", recent), np.mean),
            "validation_loss": None
            if held_out is None
            else _finite(held_out.column("loss"), np.min),
            "test_loss": None if test is None else _last(test.column("loss", 1)),
            "tokens_per_second": rate,
            "mfu": _finite(train.column("mfu", recent), np.mean),
            "memory_bytes": _last(train.column("memory_allocated_bytes", 1)),
            POWER: _finite(self._column(train, POWER)[-recent:], np.mean)
            if self._derived(train)
            else None,
            **{name: _last(train.column(name, 1)) for name in names},
        }


def find_runs(words: Sequence[str]) -> list[tuple[str, Path]]:
    """Return names and metrics files for the user's arguments. An argument is a file, a folder that
    contains ``metrics.jsonl`` at most two levels below, or NAME=PATH. Raises FileNotFoundError if a
    path or a metrics file does not exist."""
    runs: list[tuple[str, Path]] = []
    for word in words:
        name, equals, rest = word.partition("=")
        named = bool(equals) and not Path(word).exists()
        path = Path(rest if named else word)
        files = [path]
        if path.is_dir():
            files = sorted(path.glob(METRICS)) or sorted(path.glob(f"*/{METRICS}"))
            files = files or sorted(path.glob(f"*/*/{METRICS}"))
            if not files:
                raise FileNotFoundError(
                    f"{path}: no {METRICS} here or in its folders; a run writes it with "
                    "--metrics-file"
                )
        elif not path.exists():
            raise FileNotFoundError(
                f"{path}: no such file or folder; give the file that a run wrote with "
                "--metrics-file, or the folder it is in"
            )
        for file in files:
            folder = file.parent.name if file.name == METRICS else file.stem
            runs.append((name if named and len(files) == 1 else folder or str(file), file))
    names = [name for name, _ in runs]
    return [
        (_shown_name(name if names.count(name) == 1 else str(path)), path) for name, path in runs
    ]


def _shown_name(name: str) -> str:
    """Replace bytes in a file name that are not valid UTF-8."""
    return os.fsencode(name).decode(errors="replace")


def _rough(seconds: float) -> str:
    for name, size in (("days", 86400.0), ("hours", 3600.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds / 60:.0f} minutes"


def _shown(curve: Curve) -> dict[str, Column]:
    return {"x": np.ascontiguousarray(curve.x), "y": np.ascontiguousarray(curve.y)}


def _finite(values: Column, reduce: Callable[[Column], np.floating]) -> float | None:
    finite = values[np.isfinite(values)]
    return float(reduce(finite)) if len(finite) else None


def _last(values: Column) -> float | None:
    return float(values[-1]) if len(values) and np.isfinite(values[-1]) else None


def _cell(value: float, whole: bool = False) -> str:
    if not math.isfinite(value):
        return ""
    return str(int(value)) if whole else repr(value)


def _field(name: str) -> str:
    """Return a heading for a CSV file: quoted if needed, and never a spreadsheet formula."""
    text = name if name[:1] not in "=+-@\t\r" else f"'{name}"
    return '"' + text.replace('"', '""') + '"' if any(c in text for c in ',"\n\r') else text
