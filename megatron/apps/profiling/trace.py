"""Traces of torch's profiler: the Chrome trace format that Kineto writes, plain or gzip.

Times are microseconds since the first event.
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
"""Beginning of the name of the event that torch's profiler writes around every step."""

_LONGEST_NAME = 1000
"""Characters of a name that count; the patterns that classify names are slow on longer ones."""


class TraceError(ValueError):
    """A file that is not a trace of training steps; the message names it."""


class Event(NamedTuple):
    """An operator, scope, CUDA call or kernel: its name, CPU thread or device stream, start and end
    in microseconds, and Kineto's arguments."""

    name: str
    thread: str
    start: float
    end: float
    args: Mapping[str, Any]


@dataclass(frozen=True)
class Trace:
    """The events of a trace by kind, in the order of their start, outer ones first; ``launches``
    are CUDA calls that start something on the device, by correlation; ``waits`` those that wait for
    it; ``allocations`` are (thread, time, bytes)."""

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
        """The training thread; a TraceError if no steps were recorded."""
        for thread, events in self.host.items():
            if any(event.name.startswith(STEP) for event in events):
                return thread
        raise TraceError(
            f"{self.path}: contains no training step ({STEP}...); such traces are written by "
            "--profile, and by torch.profiler.profile with a schedule whose step() is called"
        )

    def steps(self) -> list[Event]:
        """The steps, as the training thread saw them; a TraceError without any."""
        return [e for e in self.host[self.main_thread] if e.name.startswith(STEP)]


def read_trace(path: Path) -> Trace:
    """Reads a trace file; a TraceError if it is not one."""
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
