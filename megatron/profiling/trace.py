"""Traces of torch's profiler: the Chrome trace format that Kineto writes, plain or packed by gzip.

Times are microseconds from the first event on.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

STEP = "ProfilerStep#"
"""How the event begins that torch's profiler writes around every step."""

KERNEL_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_ON_HOST = frozenset({"cpu_op", "user_annotation"})
_CALLS = frozenset({"cuda_runtime", "cuda_driver"})


class TraceError(ValueError):
    """A file that is no trace of training steps; the message names it."""


class Event(NamedTuple):
    """Something that takes time.

    Attributes:
        name: operator, scope, call or kernel.
        category: Kineto's category (``cpu_op``, ``user_annotation``, ``kernel``).
        thread: thread of the host, or stream of the device.
        start: microseconds.
        end: microseconds.
        args: what Kineto says about it.
    """

    name: str
    category: str
    thread: str
    start: float
    end: float
    args: Mapping[str, Any]


class Allocation(NamedTuple):
    """Memory that is allocated (positive) or released (negative).

    Attributes:
        thread: thread of the host.
        time: microseconds.
        size: bytes.
        on_device: whether it is memory of an accelerator.
    """

    thread: str
    time: float
    size: int
    on_device: bool


@dataclass(frozen=True)
class Trace:
    """A trace, its events by what they tell.

    Attributes:
        path: the file.
        host: operators and scopes, by thread, in the order in which they begin, outer ones first.
        calls: calls into CUDA that start something on the device, by correlation.
        waits: calls into CUDA with which the host waits.
        kernels: what ran on the device: kernels, copies and fills.
        device_steps: the device's view of the steps.
        allocations: allocations, by thread, in order.
        about: what the trainer wrote about the run (peak of the matrix products, steps).
        rank: rank of the process.
    """

    path: Path
    host: dict[str, list[Event]]
    calls: dict[int, Event]
    waits: list[Event]
    kernels: list[Event]
    device_steps: list[Event]
    allocations: dict[str, list[Allocation]]
    about: Mapping[str, Any] = field(default_factory=dict)
    rank: int = 0

    @property
    def main_thread(self) -> str:
        """The thread that trains.

        Raises:
            TraceError: no steps were recorded.
        """
        for thread, events in self.host.items():
            if any(event.name.startswith(STEP) for event in events):
                return thread
        raise TraceError(
            f"{self.path}: holds no training step ({STEP}...); --profile writes such traces, and "
            "torch.profiler.profile with a schedule whose step() is called"
        )

    def steps(self) -> list[Event]:
        """The steps, as the training thread saw them.

        Raises:
            TraceError: no steps were recorded.
        """
        return [e for e in self.host[self.main_thread] if e.name.startswith(STEP)]


def read_trace(path: Path) -> Trace:
    """Reads a trace file.

    Raises:
        TraceError: the file is no trace.
        OSError: it cannot be read.
    """
    content = path.read_bytes()
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error) as error:
            raise TraceError(f"{path}: broken gzip file ({error})") from None
    try:
        parsed = orjson.loads(content)
    except ValueError as error:
        raise TraceError(f"{path}: no JSON ({error})") from None
    events = parsed.get("traceEvents") if isinstance(parsed, dict) else None
    if not isinstance(events, list):
        raise TraceError(
            f'{path}: has no list "traceEvents"; a trace is what torch.profiler writes with '
            "export_chrome_trace"
        )
    try:
        return _sorted_out(path, parsed, events)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TraceError(
            f"{path}: an event lacks what Kineto writes ({type(error).__name__}: {error})"
        ) from None


def _sorted_out(path: Path, parsed: Mapping[str, Any], events: list[dict[str, Any]]) -> Trace:
    begin = min((e["ts"] for e in events if "ts" in e and e.get("ph") in ("X", "i")), default=0.0)
    trace = Trace(
        path=path,
        host={},
        calls={},
        waits=[],
        kernels=[],
        device_steps=[],
        allocations={},
        about=parsed.get("megatron") or {},
        rank=(parsed.get("distributedInfo") or {}).get("rank", 0),
    )
    for e in events:
        kind, category = e.get("ph"), e.get("cat", "")
        args = e.get("args") or {}
        if kind == "i" and e["name"] == "[memory]":
            # Device types of torch: 0 is the CPU.
            allocation = Allocation(
                str(e["tid"]), e["ts"] - begin, args["Bytes"], args["Device Type"] != 0
            )
            trace.allocations.setdefault(allocation.thread, []).append(allocation)
        if kind != "X":
            continue
        start = e["ts"] - begin
        event = Event(e["name"], category, str(e["tid"]), start, start + e.get("dur", 0.0), args)
        if category in _ON_HOST:
            trace.host.setdefault(event.thread, []).append(event)
        elif category in _CALLS:
            if "Synchronize" in event.name:
                trace.waits.append(event)
            elif "correlation" in args:
                trace.calls[args["correlation"]] = event
        elif category in KERNEL_CATEGORIES:
            trace.kernels.append(event)
        elif category == "gpu_user_annotation" and event.name.startswith(STEP):
            trace.device_steps.append(event)
    for of_thread in trace.host.values():
        of_thread.sort(key=lambda event: (event.start, -event.end))
    for released in trace.allocations.values():
        released.sort(key=lambda allocation: allocation.time)
    trace.kernels.sort(key=lambda event: event.start)
    return trace
