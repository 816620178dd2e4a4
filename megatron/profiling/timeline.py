"""What a thread of the host does at every moment: which event is the innermost one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megatron.profiling.categories import Place, inside
from megatron.profiling.scopes import BACKWARD
from megatron.profiling.trace import Event

Interval = tuple[float, float]
"""Start and end, microseconds."""


class Segment(NamedTuple):
    """A time in which one event is the innermost one.

    Attributes:
        start: microseconds.
        end: microseconds.
        place: where that is.
        event: the event.
    """

    start: float
    end: float
    place: Place
    event: Event


class Open(NamedTuple):
    """An event that has begun, and until when it lasts."""

    end: float
    place: Place
    event: Event


def segments(events: Sequence[Event], contexts: dict[int, str]) -> Iterator[Segment]:
    """Cuts a thread's time into segments; times in no event are left out.

    Args:
        events: of one thread, in the order in which they begin, outer ones first.
        contexts: context of forward operators by autograd's sequence number; those of this thread
            are added, those of gradients are looked up.
    """
    stack: list[Open] = []
    now = 0.0
    for event in events:
        while stack and stack[-1].end <= event.start:
            if stack[-1].end > now:
                yield Segment(now, stack[-1].end, stack[-1].place, stack[-1].event)
                now = stack[-1].end
            stack.pop()
        if stack and event.start > now:
            yield Segment(now, event.start, stack[-1].place, stack[-1].event)
        now = max(now, event.start)
        # Rounded times may let an inner event outlast the outer one.
        end = min(event.end, stack[-1].end) if stack else event.end
        parent = stack[-1].place if stack else Place()
        place = _place(parent, event, contexts)
        if stack and stack[-1].event.name == event.name:
            event = stack[-1].event  # dispatched once more: one call
        stack.append(Open(end, place, event))
    while stack:
        top = stack.pop()
        if top.end > now:
            yield Segment(now, top.end, top.place, top.event)
            now = top.end


def _place(parent: Place, event: Event, contexts: dict[int, str]) -> Place:
    number = event.args.get("Sequence number")
    if number is None:
        return inside(parent, event.name)
    if event.name.startswith("autograd::engine::evaluate_function"):
        return inside(parent, event.name, contexts.get(number))
    place = inside(parent, event.name)
    if place.phase != BACKWARD:
        # Several operators carry a number, outer before inner; the last one recorded the gradient.
        if place.context is not None:
            contexts[number] = place.context
        else:
            contexts.pop(number, None)
    return place


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The intervals, those that touch or overlap joined, in order."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        elif end > start:
            joined.append((start, end))
    return joined


def without(intervals: Sequence[Interval], holes: Sequence[Interval]) -> list[Interval]:
    """What of the intervals lies in no hole; both in order and without overlap."""
    left: list[Interval] = []
    for start, end in intervals:
        for hole_start, hole_end in holes:
            if hole_end <= start or hole_start >= end:
                continue
            if hole_start > start:
                left.append((start, hole_start))
            start = max(start, hole_end)
        if end > start:
            left.append((start, end))
    return left


def common(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """What lies in both; both in order and without overlap."""
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if end > start:
            found.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Microseconds that the intervals cover together."""
    return sum(end - start for start, end in intervals)
