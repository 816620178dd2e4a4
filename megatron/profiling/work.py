"""A step as a list of pieces of work that cover it without overlap."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron.profiling.categories import COMMUNICATION, HOST, IDLE, kernel_category
from megatron.profiling.scopes import OUTSIDE, REST
from megatron.profiling.timeline import Interval, Segment, common, segments, union, without
from megatron.profiling.trace import Event, Trace


class Work(NamedTuple):
    """A piece of a step that belongs to one category and one phase.

    Attributes:
        category: what kind of work.
        phase: phase of the step.
        time: microseconds.
        name: the operator or kernel; empty where nothing runs.
        segment: what the host did, or where it started the kernel; None if that is not known.
        step: number of the step in the trace, from 0.
        begins: whether the operator or kernel begins here; it may come in several pieces.
    """

    category: str
    phase: str
    time: float
    name: str
    segment: Segment | None = None
    step: int = 0
    begins: bool = False


class Threads:
    """What the host's threads do at every moment, the training thread first.

    Raises:
        TraceError: the trace holds no steps.
    """

    def __init__(self, trace: Trace) -> None:
        self.main = trace.main_thread
        contexts: dict[int, str] = {}
        self.segments = {self.main: list(segments(trace.host[self.main], contexts))}
        for thread, events in trace.host.items():
            if thread != self.main:
                self.segments[thread] = list(segments(events, contexts))
        self._starts = {thread: [s.start for s in each] for thread, each in self.segments.items()}
        self._calls = trace.calls

    def at(self, thread: str, time: float) -> Segment | None:
        """What a thread does at a moment; None if no event lasts then."""
        found = bisect_right(self._starts.get(thread, []), time) - 1
        if found < 0:
            return None
        segment = self.segments[thread][found]
        return segment if time <= segment.end else None

    def launch(self, kernel: Event) -> Segment | None:
        """Where the host started a kernel; None if that was before the trace."""
        call = self._calls.get(kernel.args.get("correlation", -1))
        return None if call is None else self.at(call.thread, call.start)

    def phase(self, segment: Segment | None) -> str:
        """The phase of a piece of work: its own thread's, else the training thread's, in whose
        backward pass other threads work."""
        if segment is None:
            return REST
        if segment.place.phase != REST:
            return segment.place.phase
        main = self.at(self.main, segment.start)
        return REST if main is None else main.place.phase


def outside(trace: Trace) -> list[Interval]:
    """Evaluations and saves."""
    events = trace.host[trace.main_thread]
    return union((event.start, event.end) for event in events if event.name in OUTSIDE)


def step_times(trace: Trace) -> list[list[Interval]]:
    """When each step took place on the host, evaluations and saves left out."""
    holes = outside(trace)
    return [without([(event.start, event.end)], holes) for event in trace.steps()]


def host_work(threads: Threads, steps: Sequence[Sequence[Interval]]) -> Iterator[Work]:
    """The training thread's time. Where it runs no operator but a collective runs in another
    thread, it waits for that.

    Args:
        threads: what the threads do.
        steps: when the steps took place.
    """
    running = collectives_running(threads)
    places = sorted((start, end, n) for n, each in enumerate(steps) for start, end in each)
    starts = [start for start, _, _ in places]
    begun: set[int] = set()
    for segment in threads.segments[threads.main]:
        found = bisect_right(starts, segment.start) - 1
        if found < 0 or segment.start >= places[found][1]:
            continue
        step, place = places[found][2], segment.place
        # Steps, evaluations and saves are events themselves: segments end where they do.
        time, name = segment.end - segment.start, segment.event.name
        begins = id(segment.event) not in begun
        begun.add(id(segment.event))
        if place.category == HOST:
            waited = common([(segment.start, segment.end)], _near(running, segment))
            waiting = sum(end - start for start, end in waited)
            if waiting:
                yield Work(COMMUNICATION, place.phase, waiting, name, segment, step)
                time -= waiting
        yield Work(place.category, place.phase, time, name, segment, step, begins)


def collectives_running(threads: Threads) -> list[Interval]:
    """Times in which threads beside the training thread are in a collective."""
    return union(
        (segment.start, segment.end)
        for thread, each in threads.segments.items()
        if thread != threads.main
        for segment in each
        if segment.place.category == COMMUNICATION
    )


def working(threads: Threads) -> list[Interval]:
    """Times in which the training thread is in an operator that is no collective."""
    return union(
        (segment.start, segment.end)
        for segment in threads.segments[threads.main]
        if segment.place.category not in (COMMUNICATION, HOST)
    )


def _near(intervals: Sequence[Interval], around: Segment) -> Sequence[Interval]:
    first = max(0, bisect_left(intervals, (around.start,)) - 1)
    return intervals[first : bisect_left(intervals, (around.end,))]


def device_window(trace: Trace) -> list[Interval]:
    """From the first step to the end of the last one, as the device saw them; without holes, so
    that what lies between the last kernel of a step and the first one of the next is idle."""
    seen = trace.device_steps or trace.steps()
    window = (min(event.start for event in seen), max(event.end for event in seen))
    return without([window], outside(trace))


def device_work(
    trace: Trace, threads: Threads, window: Sequence[Interval]
) -> tuple[list[Work], float]:
    """The device's time, all steps together, and how long a collective ran beside other work.

    Of kernels that run at once the one that began first counts, collectives only where nothing
    else runs; idle is what is left.

    Args:
        trace: a trace with kernels.
        threads: what the host's threads do.
        window: the time that is split.
    """
    work: list[Work] = []
    taken: list[Interval] = []
    sending: list[tuple[Event, Segment | None]] = []
    for kernel in trace.kernels:
        segment = threads.launch(kernel)
        place = None if segment is None else segment.place
        category = kernel_category(kernel.name, place)
        if category == COMMUNICATION:
            sending.append((kernel, segment))
        else:
            phase = threads.phase(segment)
            work += _pieces(kernel, category, phase, segment, taken, window)
    working = union(taken)
    sent = common(union((kernel.start, kernel.end) for kernel, _ in sending), window)
    hidden = common(sent, working)
    taken = working
    for kernel, segment in sending:
        phase = threads.phase(segment)
        alone: list[Interval] = []
        pieces = _pieces(kernel, COMMUNICATION, phase, segment, alone, window, taken)
        work += pieces
        taken = union([*taken, *alone]) if alone else taken
    work += _idle(without(common(window, window), taken), threads)
    return work, sum(end - start for start, end in hidden)


def _pieces(
    kernel: Event,
    category: str,
    phase: str,
    segment: Segment | None,
    taken: list[Interval],
    window: Sequence[Interval],
    busy: Sequence[Interval] = (),
) -> Iterator[Work]:
    """What of a kernel's time is its own; that is added to ``taken``, whose last interval ends
    last."""
    start = max(kernel.start, taken[-1][1]) if taken else kernel.start
    if kernel.end <= start:
        return
    taken.append((start, kernel.end))
    own = common([(start, kernel.end)], window)
    if busy:
        first = max(0, bisect_left(busy, (start,)) - 1)
        own = without(own, busy[first : bisect_left(busy, (kernel.end,))])
        taken[-1:] = own
    for begin, end in own:
        begins = (begin, end) == own[0]
        yield Work(category, phase, end - begin, kernel.name, segment, begins=begins)


def _idle(idle: Sequence[Interval], threads: Threads) -> Iterator[Work]:
    """Idle times of the device, by what the training thread does meanwhile."""
    by_phase: Mapping[str, list[Interval]] = defaultdict(list)
    for segment in threads.segments[threads.main]:
        by_phase[segment.place.phase].append((segment.start, segment.end))
    for phase, times in by_phase.items():
        for start, end in common(idle, union(times)):
            yield Work(IDLE, phase, end - start, "")
    rest = without(idle, union(interval for times in by_phase.values() for interval in times))
    for start, end in rest:
        yield Work(IDLE, REST, end - start, "")


def least(work: Sequence[Work], steps: int) -> list[Work]:
    """One step of pieces that each take the least time that they took in any step.

    Pieces of different steps belong together when they have the same operator, category and phase
    and are as manieth of these in their step. What other programs on the machine cost, one step or
    another is spared. Pieces that some steps lack are left out.
    """
    found: dict[tuple[tuple[str, str, str], int], list[Work]] = defaultdict(list)
    counts: dict[tuple[tuple[str, str, str], int], int] = defaultdict(int)
    for piece in work:
        # The name of a step's own event ends in its number.
        kind = (piece.category, piece.phase, piece.name.partition("#")[0])
        found[kind, counts[kind, piece.step]].append(piece)
        counts[kind, piece.step] += 1
    return [
        min(pieces, key=lambda piece: piece.time)
        for pieces in found.values()
        if len(pieces) == steps
    ]
