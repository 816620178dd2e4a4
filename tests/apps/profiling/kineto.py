"""Small traces in the form in which Kineto writes them, built by hand."""

import gzip
import json
from pathlib import Path
from typing import Any

MAIN, WORKER = 100, 200
START = 4_434_953_107_016.25
"""Kineto's clock is microseconds since the machine started: times are large."""


def event(
    name: str, start: float, end: float, cat: str = "cpu_op", tid: Any = MAIN, **args: Any
) -> dict:
    """A complete event; arguments by Kineto's names, blanks for underscores."""
    named = {key.replace("_", " "): value for key, value in args.items()}
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 1,
        "tid": tid,
        "ts": START + start,
        "dur": end - start,
        "args": named,
    }


def scope(name: str, start: float, end: float) -> dict:
    return event(name, start, end, cat="user_annotation")


def step(number: int, start: float, end: float) -> dict:
    return scope(f"ProfilerStep#{number}", start, end)


def launch(correlation: int, start: float, tid: int = MAIN) -> dict:
    """A call that starts a kernel."""
    return event(
        "cudaLaunchKernel", start, start + 1, cat="cuda_runtime", tid=tid, correlation=correlation
    )


def kernel(name: str, correlation: int, start: float, end: float, stream: int = 7, **args) -> dict:
    return event(
        name, start, end, cat="kernel", tid=stream, correlation=correlation, stream=stream, **args
    )


def memory(start: float, size: int, device: int = 0) -> dict:
    return {
        "ph": "i",
        "cat": "cpu_instant_event",
        "s": "t",
        "name": "[memory]",
        "pid": 1,
        "tid": MAIN,
        "ts": START + start,
        "args": {"Bytes": size, "Device Type": device, "Device Id": -1, "Total Allocated": size},
    }


def write(path: Path, *events: dict, **about: Any) -> Path:
    """A trace file; gzip where its name says so."""
    content = {
        "schemaVersion": 1,
        "deviceProperties": [],
        "distributedInfo": {"backend": "gloo", "rank": 3, "world_size": 4},
        "traceEvents": [{"ph": "M", "name": "process_name", "pid": 1, "args": {}}, *events],
        **about,
    }
    data = json.dumps(content).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path
