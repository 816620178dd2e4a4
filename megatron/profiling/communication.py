"""The collectives of a step."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.profiling.categories import COMMUNICATION, kernel_category, mark_of
from megatron.profiling.timeline import Interval, common, length, union
from megatron.profiling.trace import Event, Trace

_BYTES = {
    "double": 8, "float": 4, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "int": 4,
    "signed char": 1, "unsigned char": 1, "bool": 1, "Float": 4, "BFloat16": 2, "Half": 2,
    "Double": 8, "Long": 8, "Int": 4, "Byte": 1, "Bool": 1, "Float8_e4m3fn": 1, "Float8_e5m2": 1,
}  # fmt: skip
"""Bytes of an element, as Kineto names number formats of tensors and of NCCL's collectives."""

_NCCL = re.compile(r"(?:nccl|rccl)\w*?Kernel_([A-Za-z]+)")


@dataclass(frozen=True)
class Collective:
    """One kind of collective.

    Attributes:
        name: which.
        calls: calls in a step.
        time: microseconds of a step in which one is running, waiting for other ranks included.
        size: bytes of a step that this rank puts in; 0 where the trace does not say.
    """

    name: str
    calls: float
    time: float
    size: float


def collectives(trace: Trace, windows: Sequence[Interval], steps: int) -> list[Collective]:
    """Collectives of the mean step, those that take most time first.

    Args:
        trace: the trace.
        windows: times of the steps.
        steps: number of steps.
    """
    times: dict[str, list[Interval]] = defaultdict(list)
    sizes: dict[str, float] = defaultdict(float)
    for event in _running(trace):
        if common([(event.start, event.end)], windows):
            name = _name(event)
            times[name].append((event.start, event.end))
            sizes[name] += _size(event)
    found = [
        Collective(
            name, len(each) / steps, length(common(union(each), windows)) / steps,
            sizes[name] / steps,
        )
        for name, each in times.items()
    ]  # fmt: skip
    return sorted(found, key=lambda each: -each.time)


def _running(trace: Trace) -> Iterator[Event]:
    if trace.kernels:
        yield from (k for k in trace.kernels if kernel_category(k.name, None) == COMMUNICATION)
        return
    main = trace.main_thread
    for thread, events in trace.host.items():
        if thread != main:
            yield from (e for e in events if mark_of(e.name).own == COMMUNICATION)


def _name(event: Event) -> str:
    named = event.args.get("Collective name")
    found = _NCCL.search(event.name)
    return named or (f"nccl:{found[1]}" if found else event.name)


def _size(event: Event) -> float:
    elements, kind = event.args.get("In msg nelems"), event.args.get("dtype")
    if elements is not None:
        return float(elements) * _BYTES.get(str(kind), 0)
    dims, kinds = event.args.get("Input Dims") or [], event.args.get("Input type") or []
    return float(
        sum(
            math.prod(shape) * _BYTES.get(kind, 0)
            for shape, kind in zip(dims, kinds, strict=False)
            if shape and isinstance(shape[0], int)
        )
    )
