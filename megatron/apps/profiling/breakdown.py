"""Breakdown of a step's time: every moment is assigned to one category and one phase.

HolisticTraceAnalysis (0.5.0) is not used, because it reads no CPU traces, distinguishes neither
phases nor categories of kernels, and depends on JupyterLab. docs/guides/profiling.md shows what it
adds.
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
    COMMUNICATION,
    GEMMS,
    HOST,
    IDLE,
    OUTSIDE,
    PHASES,
    REST,
    Label,
    kernel_category,
    mark_of,
)
from megatron.apps.profiling.trace import Event, Indices, Thread, Trace, TraceError, edges_of, paint


class TimeEntry(NamedTuple):
    """Row of a table in a breakdown, per step.

    Attributes:
        name: name of an operator, kernel, collective or wait, or "M x K x N" for a GEMM.
        time: microseconds. For an operator, without the operators inside it; for a collective,
          including the wait for other ranks.
        amount: bytes that an operator allocates or that this rank contributes to a collective, or
          FLOPs of GEMMs (two per multiply-add).
    """

    name: str
    phase: str
    calls: float
    time: float
    amount: float = 0.0


@dataclass(frozen=True)
class Breakdown:
    """Time of a step by category and phase, in microseconds per step.

    Attributes:
        kind: ``mean`` for the mean of the steps, or ``least`` if each operator is taken from the
          step in which it was fastest.
        on_device: True for a device's time, False for the time of the training thread on a CPU.
        cells: time by (category, phase). The values add up to ``step``.
        hidden: time, in the mean step, in which a collective overlaps with other work.
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
        return sum(self.cells.get((category, phase), 0.0) for phase in PHASES)

    def of_phase(self, phase: str) -> float:
        return sum(time for (_, each), time in self.cells.items() if each == phase)

    def to_dict(self) -> dict[str, Any]:
        """Return the breakdown as JSON values, with times in milliseconds per step."""
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


class Work(NamedTuple):
    """Microseconds of a step that belong to one category and one phase. ``event`` is the CPU event,
    or the one that launched the kernel, and ``launched`` is that event's category."""

    category: str
    phase: str
    time: float
    name: str
    event: Event | None = None
    launched: str = ""
    step: int = 0


def break_down(trace: Trace, least: bool = False) -> Breakdown:
    """Break down the mean of a trace's steps: the training thread's time on a CPU, or the device's
    time on a GPU. With ``least``, each operator is taken from the step in which it was fastest.
    Raises TraceError if the trace has no steps, or if ``least`` is used with a GPU trace."""
    on_device = bool(trace.kernels)
    if on_device and least:
        raise TraceError(
            f"{trace.path}: --least is for the time of a CPU, which other programs use too; this "
            "trace is of a GPU"
        )
    grid = _Grid(trace)
    work, hidden = _device_work(grid) if on_device else _host_work(grid)
    total, expected, count = sum(w.time for w in work), grid.length(grid.window), len(grid.steps)
    # Timestamps have a resolution of a nanosecond.
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
    """Time axis of a trace, cut into cells at every start and end of an event, with the trace's
    steps.

    Attributes:
        on_main: index of the training thread's event in each cell.
        window: cells to break down; the device's cells if the trace has device events.
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
            # Include the gaps between steps: the device is idle from one step's last kernel to the
            # next step's first.
            seen = trace.device_steps or self.steps
            first, last = min(e.start for e in seen), max(e.end for e in seen)
            self.window = (self.middle > first) & (self.middle < last) & counted

    def paint(self, events: Sequence[Event]) -> Indices:
        """Return, for each cell, the index of the last of the events that cover it, or -1."""
        return paint(self._edges, [(event.start, event.end) for event in events])

    def length(self, cells: npt.NDArray[np.bool_]) -> float:
        return float(self._width[cells].sum())

    def times(self, owners: Indices, cells: npt.NDArray[np.bool_], count: int) -> list[float]:
        """Return how many microseconds in ``cells`` each of ``count`` events owns."""
        cells = cells & (owners >= 0)
        times: list[float] = np.bincount(owners[cells], self._width[cells], count).tolist()
        return times

    def label(self, thread: str, time: float) -> Label:
        """Return the label of a thread's event at a time. If the event has no phase of its own, as
        in threads that work for the backward pass, it gets the training thread's phase."""
        innermost = self.threads[thread].find(time) if thread in self.threads else None
        label = Label() if innermost is None else innermost[1]
        main = self.main.find(time)
        return label if label.phase != REST or main is None else label._replace(phase=main[1].phase)

    def _in_steps(self, time: float) -> bool:
        cell = int(np.searchsorted(self._edges, time, side="right")) - 1
        return 0 <= cell < len(self.in_steps) and bool(self.in_steps[cell])

    def allocated(self, parts: int) -> dict[str, float]:
        """Return the bytes that each training-thread operator allocates in ``parts`` mean steps."""
        memory: dict[str, float] = defaultdict(float)
        for thread, time, size in self.trace.allocations:
            innermost = self.main.find(time)
            if thread == self.trace.main_thread and innermost and self._in_steps(time):
                memory[innermost[0].name] += size * parts / len(self.steps)
        return memory

    def collective_calls(self) -> list[TimeEntry]:
        """Return the collectives of the mean step, slowest first."""
        inside = np.concatenate(([0], np.cumsum(self._width * self.window)))
        named: dict[str, list[Event]] = defaultdict(list)
        for event in self.collectives:
            first, last = np.searchsorted(self._edges, (event.start, event.end))
            if inside[last] > inside[first]:
                short = re.search(r"(?:nccl|rccl)\w*?Kernel_([A-Za-z]+)", event.name)
                name = f"nccl:{short[1]}" if short else event.name
                named[event.args.get("Collective name") or name].append(event)
        calls = [
            TimeEntry(
                name,
                "",
                len(events),
                self.length(self.window & (self.paint(events) >= 0)),
                sum(map(_input_bytes, events)),
            )
            for name, events in named.items()
        ]
        return _summed(calls, len(self.steps))

    def waits(self) -> list[TimeEntry]:
        """Return the reads of tensors' values, and the CUDA calls that wait for the device."""
        reads = [
            event
            for events in self.trace.host.values()
            for event in events
            if event.name == "aten::_local_scalar_dense"
        ]
        waits = [
            TimeEntry(e.name, self.label(e.thread, e.start).phase, 1, e.end - e.start)
            for e in [*reads, *self.trace.waits]
            if self._in_steps(e.start)
        ]
        return sorted(_summed(waits, len(self.steps)))


def _host_work(grid: _Grid) -> tuple[list[Work], float]:
    """Return the training thread's time, and the time in which collectives overlapped with its
    work. A thread that runs no operator while another thread runs a collective is counted as
    waiting for that collective."""
    main = grid.main
    sending = np.zeros(len(grid.middle), bool)
    for thread in grid.threads.values():
        if thread is not main:
            numbers = [n for n, e in enumerate(thread.labels) if e.category == COMMUNICATION]
            sending |= np.isin(thread.at(grid.middle), numbers)
    categories = np.array([label.category for label in main.labels])[grid.on_main]
    waiting = sending & (categories == HOST)
    worked = grid.times(grid.on_main, grid.window & ~waiting, len(main.events))
    waited = grid.times(grid.on_main, grid.window & waiting, len(main.events))
    starts, work = [step.start for step in grid.steps], []
    for event, label, time, wait in zip(main.events, main.labels, worked, waited, strict=True):
        step = bisect_right(starts, event.start) - 1
        for category, spent in ((label.category, time), (COMMUNICATION, wait)):
            if spent:
                part = Work(category, label.phase, spent, event.name, event, label.category, step)
                work.append(part)
    busy = ~np.isin(categories, (COMMUNICATION, HOST))
    return work, grid.length(grid.window & sending & busy)


def _device_work(grid: _Grid) -> tuple[list[Work], float]:
    """Return the device's time, and the time in which collectives overlapped with other kernels. Of
    concurrent kernels, only the one that began first counts, and a collective counts only if no
    other kernel runs. The remaining time is idle, in the training thread's phase."""
    kernels, sending = grid.trace.kernels, grid.paint(grid.collectives) >= 0
    # Later events overwrite earlier ones when painting.
    order = sorted(kernels, key=lambda k: (not _is_collective(k), -k.start))
    owners = grid.paint(order)
    times, work = grid.times(owners, grid.window, len(order)), []
    for kernel, time in zip(order, times, strict=True):
        launch = grid.trace.launches.get(kernel.args.get("correlation", -1))
        # Threads that only copy, such as the one that pins batches, have no operators.
        thread = grid.threads.get(launch.thread) if launch else None
        launcher = thread.find(launch.start) if launch and thread else None
        category = kernel_category(kernel.name, launcher and launcher[1])
        phase = grid.label(launch.thread, launch.start).phase if launch and launcher else REST
        event, launched = (launcher[0], launcher[1].category) if launcher else (None, "")
        if time:
            work.append(Work(category, phase, time, kernel.name, event, launched))
    idle = grid.times(grid.on_main, grid.window & (owners < 0), len(grid.main.events))
    for label, time in zip(grid.main.labels, idle, strict=True):
        if time:
            work.append(Work(IDLE, label.phase, time, ""))
    unused = grid.length(grid.window & (owners < 0) & (grid.on_main < 0))
    computing = (owners >= 0) & ~np.isin(
        owners, [n for n, kernel in enumerate(order) if _is_collective(kernel)]
    )
    hidden = grid.length(grid.window & sending & computing)
    return [*work, Work(IDLE, REST, unused, "")], hidden


def _is_collective(kernel: Event) -> bool:
    return kernel_category(kernel.name, None) == COMMUNICATION


def _least(work: Sequence[Work], steps: int) -> list[Work]:
    """Return one step in which each entry takes the least time that it took in any step. Entries of
    different steps correspond if they have the same operator, category and phase, and the same
    index among such entries of their step. Entries that are missing in some steps are dropped."""
    parts: dict[tuple[Any, int], list[Work]] = defaultdict(list)
    counts: dict[Any, int] = defaultdict(int)
    for part in work:
        # The name of the step event itself ends with the step's number.
        kind = (part.category, part.phase, part.name.partition("#")[0])
        parts[kind, counts[kind, part.step]].append(part)
        counts[kind, part.step] += 1
    return [min(each, key=lambda w: w.time) for each in parts.values() if len(each) == steps]


def _summed(entries: Iterable[TimeEntry], parts: int) -> list[TimeEntry]:
    """Sum the entries of ``parts`` steps by name and phase, and return the means, slowest first."""
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0, 0])
    for name, phase, *numbers in entries:
        sums[name, phase] = [a + b for a, b in zip(sums[name, phase], numbers, strict=True)]
    rows = [TimeEntry(*key, *(total / parts for total in sums[key])) for key in sums]
    return sorted(rows, key=lambda row: -row.time)


def _operators(work: Iterable[Work], memory: Mapping[str, float]) -> Iterator[TimeEntry]:
    for part in work:
        on_host = part.event is not None and part.event.name == part.name
        if part.name and (not on_host or mark_of(part.name).operator):
            calls = part.category == part.launched or not on_host
            yield TimeEntry(part.name, "", calls, part.time)
    for name, size in memory.items():
        yield TimeEntry(name, "", 0, 0.0, size)


# Indices of the two matrices among the inputs. The matrices are [m, k] and [k, n], or [..., k] and
# [n, k] for a linear layer.
_FACTORS = {
    "aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::_addmm_activation": (1, 2),
    "aten::_scaled_mm": (0, 1), "aten::_int_mm": (0, 1),
    "mkldnn::_linear_pointwise": (0, 1), "aten::mkldnn_linear": (0, 1),
}  # fmt: skip


def gemm_shape(event: Event) -> tuple[int, int, int] | None:
    """Return (m, k, n) of an operator's GEMM, or None if the operator is not a GEMM or the trace
    has no shapes."""
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


# Bytes per element, keyed by Kineto's dtype names in lower case.
_BYTES = {
    "double": 8, "float": 4, "bfloat16": 2, "half": 2, "long int": 8, "long": 8, "int": 4,
    "signed char": 1, "unsigned char": 1, "byte": 1, "bool": 1, "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}  # fmt: skip


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
