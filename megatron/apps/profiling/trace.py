"""Traces of torch's profiler in the Chrome trace format that Kineto writes, plain or gzipped, and
the innermost event of a thread at every moment.

Times are in microseconds since the first event.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from megatron.apps.profiling.categories import BACKWARD, Label, label_inside

Times = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Interval = tuple[float, float]

# Prefix of the event that torch records around every step.
STEP = "ProfilerStep#"

_LONGEST_NAME = 1000  # in characters; the patterns that classify names are slow on longer ones


class TraceError(ValueError):
    """Raised if a file is not a trace of training steps. The message names the file."""


class Event(NamedTuple):
    """Operator, scope, CUDA call or kernel: its name, its CPU thread or device stream, its start
    and end in microseconds, and Kineto's arguments."""

    name: str
    thread: str
    start: float
    end: float
    args: Mapping[str, Any]


@dataclass(frozen=True)
class Trace:
    """Events of a trace by kind, sorted by start, outer events first. ``launches`` are CUDA calls
    that start work on the device, by correlation id. ``waits`` are CUDA calls that wait for the
    device. ``allocations`` are (thread, time, bytes)."""

    path: Path
    rank: int
    about: Mapping[str, Any]
    host: dict[str, list[Event]] = field(default_factory=dict)
    launches: dict[int, Event] = field(default_factory=dict)
    waits: list[Event] = field(default_factory=list)
    kernels: list[Event] = field(default_factory=list)
    device_steps: list[Event] = field(default_factory=list)
    allocations: list[tuple[str, float, int]] = field(default_factory=list)

    @property
    def main_thread(self) -> str:
        """Id of the training thread. Raises TraceError if no steps were recorded."""
        for thread, events in self.host.items():
            if any(event.name.startswith(STEP) for event in events):
                return thread
        raise TraceError(
            f"{self.path}: contains no training step ({STEP}...); such traces are written by "
            "--profile, and by torch.profiler.profile with a schedule whose step() is called"
        )

    def steps(self) -> list[Event]:
        """Return the step events of the training thread. Raises TraceError if no steps were
        recorded."""
        return [e for e in self.host[self.main_thread] if e.name.startswith(STEP)]


def read_trace(path: Path) -> Trace:
    """Read a trace file. Raises TraceError if the file is not a trace."""
    content = path.read_bytes()
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error) as error:
            raise TraceError(f"{path}: broken gzip file ({error})") from None
    try:
        parsed = orjson.loads(content)
    except ValueError as error:
        raise TraceError(f"{path}: not JSON ({error})") from None
    events = parsed.get("traceEvents") if isinstance(parsed, dict) else None
    if not isinstance(events, list):
        raise TraceError(
            f'{path}: has no list "traceEvents"; traces are written by torch.profiler\'s '
            "export_chrome_trace"
        )
    try:
        rank = (parsed.get("distributedInfo") or {}).get("rank", 0)
        trace = Trace(path, rank, parsed.get("megatron") or {})
        _fill(trace, events)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TraceError(
            f"{path}: an event lacks what Kineto writes ({type(error).__name__}: {error})"
        ) from None
    return trace


def _fill(trace: Trace, events: list[dict[str, Any]]) -> None:
    begin = min((e["ts"] for e in events if "ts" in e and e.get("ph") in ("X", "i")), default=0.0)
    for e in events:
        kind, category, args = e.get("ph"), e.get("cat", ""), e.get("args") or {}
        if kind == "i" and e["name"] == "[memory]" and args["Bytes"] > 0:
            trace.allocations.append((str(e["tid"]), e["ts"] - begin, args["Bytes"]))
        if kind != "X":
            continue
        start = e["ts"] - begin
        name, end = e["name"][:_LONGEST_NAME], start + e.get("dur", 0.0)
        event = Event(name, str(e["tid"]), start, end, args)
        if category in ("cpu_op", "user_annotation"):
            trace.host.setdefault(event.thread, []).append(event)
        elif category in ("cuda_runtime", "cuda_driver"):
            if "Synchronize" in event.name:
                trace.waits.append(event)
            elif "correlation" in args:
                trace.launches[args["correlation"]] = event
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            trace.kernels.append(event)
        elif category == "gpu_user_annotation" and event.name.startswith(STEP):
            trace.device_steps.append(event)
    for of_thread in trace.host.values():
        of_thread.sort(key=lambda event: (event.start, -event.end))
    trace.kernels.sort(key=lambda event: event.start)


class Thread:
    """Innermost event of a CPU thread at every moment. ``events`` must be sorted by start, outer
    events first. ``contexts`` are the contexts of forward operators, by autograd's sequence
    number."""

    def __init__(self, events: Sequence[Event], contexts: dict[int, str]) -> None:
        self.events = events
        self.labels: list[Label] = []
        intervals: list[Interval] = []
        owners: list[int] = []
        stack: list[int] = []
        for number, event in enumerate(events):
            while stack and intervals[stack[-1]][1] <= event.start:
                stack.pop()
            outer = stack[-1] if stack else None
            # Because of rounding, an inner event may appear to end after the outer one.
            end = event.end if outer is None else min(event.end, intervals[outer][1])
            intervals.append((event.start, end))
            parent = Label() if outer is None else self.labels[outer]
            self.labels.append(_label(parent, event, contexts))
            # An operator that is dispatched again under its own name counts as one call.
            again = outer is not None and events[outer].name == event.name
            owners.append(owners[outer] if again and outer is not None else number)
            stack.append(number)
        self.edges = edges_of(intervals)
        numbers = np.array([*owners, -1])[paint(self.edges, intervals)]
        # Pad both ends with -1, for times before the first and after the last event.
        self._owners = np.concatenate(([-1], numbers, [-1]))

    def at(self, times: Times | Sequence[float]) -> Indices:
        """Return the indices of the innermost events at these times, or -1 if there is no event."""
        return self._owners[np.searchsorted(self.edges, times, side="right")]

    def find(self, time: float) -> tuple[Event, Label] | None:
        """Return the innermost event at a time with its label, or None if there is no event."""
        (number,) = self.at([time])
        return None if number < 0 else (self.events[number], self.labels[number])


def _label(parent: Label, event: Event, contexts: dict[int, str]) -> Label:
    number = event.args.get("Sequence number")
    if number is None:
        return label_inside(parent, event.name)
    if event.name.startswith("autograd::engine::evaluate_function"):
        return label_inside(parent, event.name, contexts.get(number))
    label = label_inside(parent, event.name)
    if label.phase != BACKWARD:
        # Nested operators share a sequence number. The innermost one recorded the gradient.
        if label.context is not None:
            contexts[number] = label.context
        else:
            contexts.pop(number, None)
    return label


def edges_of(intervals: Iterable[Interval]) -> Times:
    """Return all starts and ends, sorted. Between two neighbours, nothing changes."""
    return np.unique(np.array([time for interval in intervals for time in interval], np.float64))


def paint(edges: Times, intervals: Sequence[Interval]) -> Indices:
    """Return, for each cell between two edges, the index of the last of the intervals that cover
    it, or -1 if none does."""
    cells = np.full(max(0, len(edges) - 1), -1, np.int64)
    bounds = np.searchsorted(edges, np.array(intervals, np.float64).reshape(-1, 2))
    for number, (first, last) in enumerate(bounds):
        cells[first:last] = number
    return cells
