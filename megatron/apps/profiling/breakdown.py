"""The breakdown of a step: every moment of it belongs to one category and one phase.

HolisticTraceAnalysis (0.5.0) answers some of this for traces of several GPUs; it reads no trace of
a CPU, knows neither phases nor categories of kernels, and depends on JupyterLab.
docs/guides/profiling.md shows what it adds.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.apps.profiling.categories import (
    BACKWARD,
    COMMUNICATION,
    GEMMS,
    HOST,
    IDLE,
    OUTSIDE,
    PHASES,
    REST,
    Label,
    kernel_category,
    label_inside,
    mark_of,
)
from megatron.apps.profiling.trace import (
    Event,
    Trace,
    TraceError,
)

Times = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Interval = tuple[float, float]


class TimeEntry(NamedTuple):
    """A row of one of the lists of a breakdown, per step.

    Attributes:
        name: operator, kernel, collective or wait; of a matrix product "M x K x N".
        time: microseconds, an operator's without those inside it, a collective's with the wait for
            other ranks.
        amount: bytes that an operator allocates or a collective receives from this rank, FLOPs of
            matrix products (two per multiply-add).
    """

    name: str
    phase: str
    calls: float
    time: float
    amount: float = 0.0


@dataclass(frozen=True)
class Breakdown:
    """Where the time of a step goes, in microseconds of a step.

    Attributes:
        kind: ``mean`` of the steps, or ``least``: each operator as in its fastest step.
        on_device: whether the time is a device's, else the training thread's on a CPU.
        cells: time by category and phase; they sum to ``step``.
        hidden: time of the mean step in which a collective runs beside other work.
    """

    path: Path
    rank: int
    steps: int
    step: float
    kind: str
    on_device: bool
    cells: Mapping[tuple[str, str], float]
    hidden: float
    operators: Sequence[TimeEntry]
    collectives: Sequence[TimeEntry]
    gemms: Sequence[TimeEntry]
    waits: Sequence[TimeEntry]
    about: Mapping[str, Any]

    def of_category(self, category: str) -> float:
        """Microseconds of a step in a category."""
        return sum(self.cells.get((category, phase), 0.0) for phase in PHASES)

    def of_phase(self, phase: str) -> float:
        """Microseconds of a step in a phase."""
        return sum(time for (_, each), time in self.cells.items() if each == phase)

    def to_dict(self) -> dict[str, Any]:
        """The breakdown as JSON values, times in milliseconds of a step."""
        milliseconds: dict[str, dict[str, float]] = defaultdict(dict)
        for (category, phase), time in self.cells.items():
            milliseconds[category][phase] = time / 1e3
        return {
            "rank": self.rank,
            "steps": self.steps,
            "kind": self.kind,
            "on_device": self.on_device,
            "step_ms": self.step / 1e3,
            "categories_ms": dict(milliseconds),
            "hidden_communication_ms": self.hidden / 1e3,
            "product_flops": sum(gemm.amount for gemm in self.gemms),
            "product_ms": sum(gemm.time for gemm in self.gemms) / 1e3,
            "waits": sum(wait.calls for wait in self.waits),
            **self.about,
        }


class Thread:
    """The innermost event of a CPU thread at every moment. Events are in the order of their start,
    outer ones first; ``contexts`` are those of forward operators by autograd's sequence number."""

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
            # Rounded times may let an inner event end after the outer one.
            end = event.end if outer is None else min(event.end, intervals[outer][1])
            intervals.append((event.start, end))
            parent = Label() if outer is None else self.labels[outer]
            self.labels.append(_label(parent, event, contexts))
            # An operator that is dispatched again under its own name is one call.
            again = outer is not None and events[outer].name == event.name
            owners.append(owners[outer] if again and outer is not None else number)
            stack.append(number)
        self.edges = edges_of(intervals)
        numbers = np.array([*owners, -1])[paint(self.edges, intervals)]
        # One value more at either end, for times before the first event and after the last.
        self._owners = np.concatenate(([-1], numbers, [-1]))

    def at(self, times: Times | Sequence[float]) -> Indices:
        """Numbers of the events at these times, -1 without one."""
        return self._owners[np.searchsorted(self.edges, times, side="right")]

    def find(self, time: float) -> tuple[Event, Label] | None:
        """The event at a time and its label; None without one."""
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
        # Several operators have a number, outer before inner; the last one recorded the gradient.
        if label.context is not None:
            contexts[number] = label.context
        else:
            contexts.pop(number, None)
    return label


def edges_of(intervals: Iterable[Interval]) -> Times:
    """All starts and ends, in order: between two neighbours nothing changes."""
    return np.unique(np.array([time for interval in intervals for time in interval], np.float64))


def paint(edges: Times, intervals: Sequence[Interval]) -> Indices:
    """For each cell between two edges the last interval that covers it, -1 if none does."""
    cells = np.full(max(0, len(edges) - 1), -1, np.int64)
    bounds = np.searchsorted(edges, np.array(intervals, np.float64).reshape(-1, 2))
    for number, (first, last) in enumerate(bounds):
        cells[first:last] = number
    return cells


class Work(NamedTuple):
    """A part of a step (microseconds) that belongs to one category and one phase; ``event`` is what
    the CPU did, or what launched the kernel, ``launched`` its category."""

    category: str
    phase: str
    time: float
    name: str
    event: Event | None = None
    launched: str = ""
    step: int = 0


def break_down(trace: Trace, least: bool = False) -> Breakdown:
    """Breaks the mean of a trace's steps down: the training thread's time on a CPU, the device's on
    a GPU; with ``least`` every operator as in the step in which it was fastest. Raises TraceError
    if the trace has no steps, or ``least`` and a GPU's time."""
    on_device = bool(trace.kernels)
    if on_device and least:
        raise TraceError(
            f"{trace.path}: --least is for the time of a CPU, which other programs use too; this "
            "trace is of a GPU"
        )
    grid = _Grid(trace)
    work, hidden = _device_work(grid) if on_device else _host_work(grid)
    total, expected, count = sum(w.time for w in work), grid.length(grid.window), len(grid.steps)
    # Times have a resolution of a nanosecond.
    assert abs(total - expected) < 1e-6 * total + 1, (total, expected)
    parts = count
    if least:
        work, parts = _least(work, count), 1
        total = sum(piece.time for piece in work)
    cells: dict[tuple[str, str], float] = defaultdict(float)
    for piece in work:
        cells[piece.category, piece.phase] += piece.time / parts
    return Breakdown(
        path=trace.path,
        rank=trace.rank,
        steps=count,
        step=total / parts,
        kind="least" if least else "mean",
        on_device=on_device,
        cells={cell: time for cell, time in cells.items() if time > 0},
        hidden=hidden / count,
        operators=_summed(_operators(work, {} if on_device else grid.allocated(parts)), parts),
        collectives=grid.collective_calls(),
        gemms=_summed(_gemms(work), parts),
        waits=grid.waits(),
        about=trace.about,
    )


class _Grid:
    """The time of a trace, cut into cells at every edge of an event, and the steps in it.

    Attributes:
        on_main: number of the training thread's event in each cell.
        window: cells that are broken down, the device's if it is a trace of one.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace, self.steps = trace, trace.steps()
        contexts: dict[int, str] = {}
        name = trace.main_thread
        self.main = Thread(trace.host[name], contexts)
        others = {t: Thread(e, contexts) for t, e in trace.host.items() if t != name}
        self.threads = {name: self.main, **others}
        device = edges_of((e.start, e.end) for e in [*trace.kernels, *trace.device_steps])
        self._edges = np.unique(
            np.concatenate([device, *(thread.edges for thread in self.threads.values())])
        )
        self._width = np.diff(self._edges)
        self.middle = self._edges[:-1] + self._width / 2
        self.on_main = self.main.at(self.middle)
        counted = self.paint([e for e in trace.host[name] if e.name in OUTSIDE]) < 0
        self.in_steps = (self.paint(self.steps) >= 0) & counted
        self.window = self.in_steps
        self.collectives = [
            e for t in others for e in trace.host[t] if mark_of(e.name).own == COMMUNICATION
        ]
        if trace.kernels:
            kernels = trace.kernels
            self.collectives = [k for k in kernels if _is_collective(k)]
            # Without holes: from the last kernel of a step to the first of the next it is idle.
            seen = trace.device_steps or self.steps
            first, last = min(e.start for e in seen), max(e.end for e in seen)
            self.window = (self.middle > first) & (self.middle < last) & counted

    def paint(self, events: Sequence[Event]) -> Indices:
        """For each cell the last of the events that covers it, -1 if none does."""
        return paint(self._edges, [(event.start, event.end) for event in events])

    def length(self, cells: npt.NDArray[np.bool_]) -> float:
        """Microseconds of these cells."""
        return float(self._width[cells].sum())

    def times(self, owners: Indices, cells: npt.NDArray[np.bool_], count: int) -> list[float]:
        """Microseconds of each of ``count`` events in those of ``cells`` that it owns."""
        cells = cells & (owners >= 0)
        times: list[float] = np.bincount(owners[cells], self._width[cells], count).tolist()
        return times

    def label(self, thread: str, time: float) -> Label:
        """The label of a thread's event; its phase is the training thread's where it has none of
        its own, as in threads that work for the backward pass."""
        found = self.threads[thread].find(time) if thread in self.threads else None
        label = Label() if found is None else found[1]
        main = self.main.find(time)
        return label if label.phase != REST or main is None else label._replace(phase=main[1].phase)

    def _in_steps(self, time: float) -> bool:
        cell = int(np.searchsorted(self._edges, time, side="right")) - 1
        return 0 <= cell < len(self.in_steps) and bool(self.in_steps[cell])

    def allocated(self, parts: int) -> dict[str, float]:
        """Bytes that each operator of the training thread allocates in ``parts`` mean steps."""
        memory: dict[str, float] = defaultdict(float)
        for thread, time, size in self.trace.allocations:
            found = self.main.find(time)
            if thread == self.trace.main_thread and found and self._in_steps(time):
                memory[found[0].name] += size * parts / len(self.steps)
        return memory

    def collective_calls(self) -> list[TimeEntry]:
        """Collectives of the mean step, the slowest first."""
        inside = np.concatenate(([0], np.cumsum(self._width * self.window)))
        named: dict[str, list[Event]] = defaultdict(list)
        for event in self.collectives:
            first, last = np.searchsorted(self._edges, (event.start, event.end))
            if inside[last] > inside[first]:
                short = re.search(r"(?:nccl|rccl)\w*?Kernel_([A-Za-z]+)", event.name)
                name = f"nccl:{short[1]}" if short else event.name
                named[event.args.get("Collective name") or name].append(event)
        found = [
            TimeEntry(
                name,
                "",
                len(events),
                self.length(self.window & (self.paint(events) >= 0)),
                sum(map(_input_bytes, events)),
            )
            for name, events in named.items()
        ]
        return _summed(found, len(self.steps))

    def waits(self) -> list[TimeEntry]:
        """Reads of tensors' values, and CUDA calls that wait for the device."""
        reads = [
            event
            for events in self.trace.host.values()
            for event in events
            if event.name == "aten::_local_scalar_dense"
        ]
        found = [
            TimeEntry(e.name, self.label(e.thread, e.start).phase, 1, e.end - e.start)
            for e in [*reads, *self.trace.waits]
            if self._in_steps(e.start)
        ]
        return sorted(_summed(found, len(self.steps)))


def _host_work(grid: _Grid) -> tuple[list[Work], float]:
    """The training thread's time, and how long a collective ran beside its work. Where it runs no
    operator but a collective runs in another thread, it waits for that."""
    main = grid.main
    sending = np.zeros(len(grid.middle), bool)
    for thread in grid.threads.values():
        if thread is not main:
            numbers = [n for n, e in enumerate(thread.labels) if e.category == COMMUNICATION]
            sending |= np.isin(thread.at(grid.middle), numbers)
    categories = np.array([label.category for label in main.labels])[grid.on_main]
    waiting = sending & (categories == HOST)
    own = grid.times(grid.on_main, grid.window & ~waiting, len(main.events))
    waited = grid.times(grid.on_main, grid.window & waiting, len(main.events))
    starts, work = [step.start for step in grid.steps], []
    for event, label, time, wait in zip(main.events, main.labels, own, waited, strict=True):
        step = bisect_right(starts, event.start) - 1
        for category, spent in ((label.category, time), (COMMUNICATION, wait)):
            if spent:
                part = Work(category, label.phase, spent, event.name, event, label.category, step)
                work.append(part)
    busy = ~np.isin(categories, (COMMUNICATION, HOST))
    return work, grid.length(grid.window & sending & busy)


def _device_work(grid: _Grid) -> tuple[list[Work], float]:
    """The device's time, and how long a collective ran beside other kernels. Of kernels that run at
    once the one that began first counts, collectives only where nothing else runs; the rest is
    idle, in the phase of the training thread."""
    kernels, sending = grid.trace.kernels, grid.paint(grid.collectives) >= 0
    # In the order of painting: the last one counts.
    order = sorted(kernels, key=lambda k: (not _is_collective(k), -k.start))
    owners = grid.paint(order)
    times, work = grid.times(owners, grid.window, len(order)), []
    for kernel, time in zip(order, times, strict=True):
        launch = grid.trace.launches.get(kernel.args.get("correlation", -1))
        # Threads that only copy, as that of pinned batches, have no operators.
        thread = grid.threads.get(launch.thread) if launch else None
        found = thread.find(launch.start) if launch and thread else None
        category = kernel_category(kernel.name, found and found[1])
        phase = grid.label(launch.thread, launch.start).phase if launch and found else REST
        event, launched = (found[0], found[1].category) if found else (None, "")
        if time:
            work.append(Work(category, phase, time, kernel.name, event, launched))
    idle = grid.times(grid.on_main, grid.window & (owners < 0), len(grid.main.events))
    for label, time in zip(grid.main.labels, idle, strict=True):
        if time:
            work.append(Work(IDLE, label.phase, time, ""))
    nobody = grid.length(grid.window & (owners < 0) & (grid.on_main < 0))
    computing = (owners >= 0) & ~np.isin(
        owners, [n for n, kernel in enumerate(order) if _is_collective(kernel)]
    )
    hidden = grid.length(grid.window & sending & computing)
    return [*work, Work(IDLE, REST, nobody, "")], hidden


def _is_collective(kernel: Event) -> bool:
    return kernel_category(kernel.name, None) == COMMUNICATION


def _least(work: Sequence[Work], steps: int) -> list[Work]:
    """One step of parts that each take the least time that they took in any step. Parts of
    different steps belong together if they have the same operator, category, phase and number among
    these in their step. Parts that some steps lack are left out."""
    found: dict[tuple[Any, int], list[Work]] = defaultdict(list)
    counts: dict[Any, int] = defaultdict(int)
    for part in work:
        # The name of a step's own event ends in its number.
        kind = (part.category, part.phase, part.name.partition("#")[0])
        found[kind, counts[kind, part.step]].append(part)
        counts[kind, part.step] += 1
    return [min(each, key=lambda w: w.time) for each in found.values() if len(each) == steps]


def _summed(entries: Iterable[TimeEntry], parts: int) -> list[TimeEntry]:
    """Entries of ``parts`` steps added up by name and phase, the slowest first."""
    found: dict[tuple[str, str], list[TimeEntry]] = defaultdict(list)
    for entry in entries:
        found[entry.name, entry.phase].append(entry)
    sums = [
        TimeEntry(
            *key, *(sum(values) / parts for values in zip(*(e[2:] for e in each), strict=True))
        )
        for key, each in found.items()
    ]
    return sorted(sums, key=lambda each: -each.time)


def _operators(work: Iterable[Work], memory: Mapping[str, float]) -> Iterator[TimeEntry]:
    for part in work:
        on_host = part.event is not None and part.event.name == part.name
        if part.name and (not on_host or mark_of(part.name).operator):
            calls = part.category == part.launched or not on_host
            yield TimeEntry(part.name, "", calls, part.time)
    for name, size in memory.items():
        yield TimeEntry(name, "", 0, 0.0, size)


_FACTORS = {
    "aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::_addmm_activation": (1, 2),
    "aten::_scaled_mm": (0, 1), "aten::_int_mm": (0, 1),
    "mkldnn::_linear_pointwise": (0, 1), "aten::mkldnn_linear": (0, 1),
}  # fmt: skip
"""Which inputs are the factors: [m, k] and [k, n], of a linear layer [..., k] and [n, k]."""


def gemm_shape(event: Event) -> tuple[int, int, int] | None:
    """(m, k, n) of an operator's matrix product; None if it has none, or the trace no shapes."""
    dims: list[Any] = event.args.get("Input Dims") or []
    first, second = _FACTORS.get(event.name, (0, len(dims)))
    if len(dims) <= second or len(dims[first]) < 2 or len(dims[second]) != 2:
        return None
    *rows, k = dims[first]
    return math.prod(rows), k, dims[second][0 if "linear" in event.name else 1]


def _gemms(work: Iterable[Work]) -> Iterator[TimeEntry]:
    seen: set[int] = set()
    for part in work:
        if part.event and part.launched == GEMMS and (shape := gemm_shape(part.event)):
            calls = id(part.event) not in seen  # one operator may launch several kernels
            seen.add(id(part.event))
            name = " x ".join(map(str, shape))
            yield TimeEntry(name, part.phase, calls, part.time, 2.0 * math.prod(shape) * calls)


_BYTES = {
    "double": 8, "float": 4, "bfloat16": 2, "half": 2, "long int": 8, "long": 8, "int": 4,
    "signed char": 1, "unsigned char": 1, "byte": 1, "bool": 1, "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}  # fmt: skip
"""Bytes of an element by dtype, as Kineto names it in lower case."""


def _input_bytes(event: Event) -> float:
    def size(dtype: Any) -> int:
        return _BYTES.get(str(dtype).lower().removeprefix("c10::"), 0)

    elements, dtype = event.args.get("In msg nelems"), event.args.get("dtype")
    if elements is not None:
        return float(elements) * size(dtype)
    dims, dtypes = event.args.get("Input Dims") or [], event.args.get("Input type") or []
    return float(
        sum(
            math.prod(shape) * size(dtype)
            for shape, dtype in zip(dims, dtypes, strict=False)
            if shape and isinstance(shape[0], int)
        )
    )
