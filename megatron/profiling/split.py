"""A training step, split: every moment of it belongs to one category and one phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.profiling.categories import mark_of
from megatron.profiling.communication import Collective, collectives
from megatron.profiling.products import Product, products
from megatron.profiling.scopes import REST
from megatron.profiling.timeline import Interval, common, length
from megatron.profiling.trace import Trace, TraceError
from megatron.profiling.work import (
    Threads,
    Work,
    collectives_running,
    device_window,
    device_work,
    host_work,
    least,
    step_times,
    working,
)

Cell = tuple[str, str]
"""Category and phase."""


@dataclass(frozen=True)
class Operator:
    """An operator of the host, or a kernel of the device.

    Attributes:
        name: its name.
        time: microseconds in a step, without those of operators inside it.
        calls: calls in a step.
        allocated: bytes that it allocates in a step; 0 for kernels.
    """

    name: str
    time: float
    calls: float
    allocated: float


@dataclass(frozen=True)
class Wait:
    """Calls with which the host waits for the device, or reads a value of a tensor.

    Attributes:
        name: the call.
        phase: phase of the step.
        calls: calls in a step.
        time: microseconds in a step.
    """

    name: str
    phase: str
    calls: float
    time: float


@dataclass(frozen=True)
class Split:
    """Where the time of a step goes.

    Attributes:
        path: the trace.
        rank: rank of the process.
        steps: steps that the trace holds.
        step: microseconds of a step.
        kind: ``mean`` of the steps, or ``least``: each operator as in the step in which it was
            fastest.
        on_device: whether the time is a device's; else it is the training thread's on a CPU.
        cells: microseconds of a step by category and phase; they sum to ``step``.
        hidden: microseconds of the mean step in which a collective runs beside other work.
        operators: what takes most time of its own, most first.
        collectives: collectives by kind.
        products: products with weights, by shape, those that take most time first.
        waits: calls with which the host waits.
        about: what the trainer wrote about the run.
    """

    path: Path
    rank: int
    steps: int
    step: float
    kind: str
    on_device: bool
    cells: Mapping[Cell, float]
    hidden: float
    operators: Sequence[Operator]
    collectives: Sequence[Collective]
    products: Sequence[Product]
    waits: Sequence[Wait]
    about: Mapping[str, Any]

    def of_category(self, category: str) -> float:
        """Microseconds of a step that go to a category."""
        return sum(time for (kind, _), time in self.cells.items() if kind == category)

    def of_phase(self, phase: str) -> float:
        """Microseconds of a step that go to a phase."""
        return sum(time for (_, each), time in self.cells.items() if each == phase)

    def to_dict(self) -> dict[str, Any]:
        """The split as JSON values, times in milliseconds of a step."""
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
            "product_flops": sum(product.flops for product in self.products),
            "product_ms": sum(product.time for product in self.products) / 1e3,
            "waits": sum(wait.calls for wait in self.waits),
            **self.about,
        }


def split(trace: Trace, undisturbed: bool = False) -> Split:
    """Splits the mean of a trace's steps: the training thread's time on a CPU, the device's on a
    GPU (see :func:`host_work` and :func:`device_work`).

    Args:
        trace: the trace.
        undisturbed: take every operator as in the step in which it was fastest.

    Raises:
        TraceError: the trace holds no steps, or ``undisturbed`` and a GPU's time.
    """
    threads, on_device = Threads(trace), bool(trace.kernels)
    times = step_times(trace)
    count, on_host = len(times), [interval for each in times for interval in each]
    if on_device:
        if undisturbed:
            raise TraceError(
                f"{trace.path}: --least is for a CPU's time; this trace is of a GPU, which other "
                "programs do not disturb"
            )
        windows = device_window(trace)
        work, hidden = device_work(trace, threads, windows)
    else:
        windows = on_host
        work = list(host_work(threads, times))
        hidden = length(common(common(collectives_running(threads), windows), working(threads)))
    total = sum(piece.time for piece in work)
    # Times have a resolution of a nanosecond.
    assert abs(total - length(windows)) < 1e-6 * total + 1, (total, length(windows))
    parts = count
    if undisturbed:
        work, parts = least(work, count), 1
        total = sum(piece.time for piece in work)
    cells: dict[Cell, float] = defaultdict(float)
    for piece in work:
        cells[piece.category, piece.phase] += piece.time / parts
    return Split(
        path=trace.path,
        rank=trace.rank,
        steps=count,
        step=total / parts,
        kind="least" if undisturbed else "mean",
        on_device=on_device,
        cells={cell: time for cell, time in cells.items() if time > 0},
        hidden=hidden / count,
        operators=_operators(work, parts, {} if on_device else _allocated(trace, threads, on_host)),
        collectives=collectives(trace, windows, count),
        products=products(work, parts),
        waits=_waits(trace, threads, on_host, count),
        about=trace.about,
    )


def _within(time: float, windows: Sequence[Interval]) -> bool:
    return any(start <= time < end for start, end in windows)


def _operators(work: Iterable[Work], parts: int, memory: Mapping[str, float]) -> list[Operator]:
    """Operators of the host or kernels of the device, those that take most time first.

    Args:
        work: pieces of the steps.
        parts: number of steps that they are of.
        memory: bytes that each operator allocates in a step.
    """
    times: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for piece in work:
        host = piece.segment.event if piece.segment else None
        if not piece.name or (host and piece.name == host.name and not mark_of(host.name).operator):
            continue
        times[piece.name] += piece.time
        calls[piece.name] += piece.begins
    found = [
        Operator(name, time / parts, calls[name] / parts, memory.get(name, 0.0))
        for name, time in times.items()
    ]
    return sorted(found, key=lambda each: -each.time)


def _allocated(trace: Trace, threads: Threads, windows: Sequence[Interval]) -> dict[str, float]:
    """Bytes that each operator allocates in the mean step."""
    memory: dict[str, float] = defaultdict(float)
    for allocation in trace.allocations.get(threads.main, ()):
        segment = threads.at(threads.main, allocation.time)
        if segment and allocation.size > 0 and _within(allocation.time, windows):
            memory[segment.event.name] += allocation.size
    return {name: size / len(trace.steps()) for name, size in memory.items()}


def _waits(trace: Trace, threads: Threads, windows: Sequence[Interval], steps: int) -> list[Wait]:
    found: dict[Cell, list[float]] = defaultdict(list)
    reads = [
        event
        for events in trace.host.values()
        for event in events
        if event.name == "aten::_local_scalar_dense"
    ]
    for event in [*reads, *trace.waits]:
        if _within(event.start, windows):
            segment = threads.at(event.thread, event.start)
            phase = REST if segment is None else segment.place.phase
            found[event.name, phase].append(event.end - event.start)
    return [
        Wait(name, phase, len(times) / steps, sum(times) / steps)
        for (name, phase), times in sorted(found.items())
    ]
