"""Detection of stragglers: ranks that the others wait for, judged by each rank's own time for
computing and reading data."""

from __future__ import annotations

import contextlib
import math
import os
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.features.resilience.flags import ResilienceConfig
from megatron.features.resilience.watch.processes import (
    frames_of_others,
    monitor_thread,
    where_it_waits,
)
from megatron.parallel.mesh import Mesh, memberships
from megatron.training.report import Reporter
from megatron.training.stopping import DelayedReads
from megatron.training.trainer import Callback, Trainer
from megatron.util.phases import activity

BLOCKS = 5
"""Number of blocks in a window. A rank must be slow in each, so that a pause is not reported."""

SECONDS = 60.0
"""Minimum duration of a window in seconds of steps. In shorter windows, which contain fewer samples
of the main thread, one in a thousand reported a difference between equally fast ranks."""

BUSY = 0.2
"""Fraction of their own time for which the other ranks had no processor, as a median. Above this,
the machines are overloaded, and a rank that lacks a processor is not reported."""

# minimum lag behind the median to be reported, as a fraction of a step
LEAST_SHARE = 0.1


class StepTimes(NamedTuple):
    """Times that one rank measured, in seconds, summed over some steps.

    Attributes:
        wall: time from the beginning of each step to its end.
        own: time in ``wall`` that was not spent waiting for other ranks.
        reading: time in ``own`` that was spent waiting for the next batch.
        unscheduled: time in ``own`` during which the process was suspended or had no processor.
        suspended: time in ``unscheduled`` that a lack of processors does not explain.
        device: time of a matrix product on the rank's GPU; 0 if it was not measured.
    """

    wall: float
    own: float
    reading: float = 0.0
    unscheduled: float = 0.0
    suspended: float = 0.0
    device: float = 0.0

    def plus(self, other: StepTimes) -> StepTimes:
        """Return the sums of two measurements, with the smaller of their measured device times."""
        both = self.device and other.device
        return StepTimes(
            self.wall + other.wall,
            self.own + other.own,
            self.reading + other.reading,
            self.unscheduled + other.unscheduled,
            self.suspended + other.suspended,
            min(self.device, other.device) if both else self.device or other.device,
        )


@dataclass(frozen=True)
class Change:
    """Rank that has become slow, or is no longer slow.

    Attributes:
        slow: True if the rank is slow.
        own, others: seconds per step of the rank itself, and of the median rank. With
            ``by_device``, seconds of a matrix product on the GPU.
        reason: cause of more than half of ``own``; empty if it is not known.
        before: True for the only rank of a pipeline stage. Then ``others`` is derived from the
            rank's own earlier time, relative to the other stages.
    """

    rank: int
    slow: bool
    own: float
    others: float
    reason: str = ""
    by_device: bool = False
    before: bool = False

    def __str__(self) -> str:
        what = "the product of matrices by which GPUs are compared" if self.by_device else "its own"
        times = f"{1000 * self.own:.3g} ms and {1000 * self.others:.3g} ms"
        whom = "in proportion to the other pipeline stages" if self.before else "the median rank"
        if not self.slow:
            return f"takes about as long as {'before' if self.before else whom} again ({times})"
        ratio = self.own / self.others if self.others else math.inf
        text = f"takes {ratio:.3g} times as long for {what}"
        text += "" if self.by_device else " part of a step"
        text += f" as {'before, ' if self.before else ''}{whom} ({times}): the others wait for it"
        return f"{text}; {self.reason}" if self.reason else text


@dataclass
class _Stage:
    """Ranks of one pipeline stage, which do the same work."""

    ranks: Sequence[int]
    usual: list[float] = field(default_factory=list)
    """Ratios of a single rank's own time to the median of all ranks, in its first blocks."""


class StragglerRule:
    """Rule that finds ranks that are persistently slower than others of their pipeline stage.

    Args:
        stages: ranks of each pipeline stage, which do the same work. The only rank of a stage is
            compared with its own earlier time, relative to the other stages.
        factor: multiple of the others' median time that counts as slow; 0 disables the rule.
        window: number of steps for which a rank must be slow. A window also lasts at least
            :data:`SECONDS`.
    """

    def __init__(self, stages: Sequence[Sequence[int]], factor: float, window: int) -> None:
        self._stages = [_Stage(ranks) for ranks in stages]
        self._factor, self._window = factor, window
        self._all = sorted(rank for ranks in stages for rank in ranks)
        self._steps, self._sums = 0, [StepTimes(0.0, 0.0) for _ in self._all]
        self._verdicts: dict[tuple[int, bool], deque[bool]] = {}
        self._named: set[tuple[int, bool]] = set()

    def add(self, steps: int, pieces: Sequence[StepTimes]) -> list[Change]:
        """Add the times of all ranks, ordered by rank, for the same ``steps`` steps. Return the
        ranks that have become slow, or are no longer slow."""
        self._steps += steps
        sums = self._sums = [a.plus(b) for a, b in zip(self._sums, pieces, strict=True)]
        wall = max(piece.wall for piece in sums)
        if not self._factor or wall * BLOCKS < SECONDS or self._steps * BLOCKS < self._window:
            return []
        steps, self._steps = self._steps, 0
        self._sums = [StepTimes(0.0, 0.0) for _ in self._all]
        changes = []
        for stage in self._stages:
            for rank in stage.ranks:
                changes += self._judge(stage, rank, sums, steps)
        return changes

    def _judge(
        self, stage: _Stage, rank: int, sums: Sequence[StepTimes], steps: int
    ) -> list[Change]:
        total = sums[rank]
        own, others = total.own / steps, self._expected(stage, rank, sums) / steps
        step = max(piece.wall for piece in sums) / steps
        behind = own > self._factor * others and own - others > LEAST_SHARE * step
        rest = [piece for other, piece in enumerate(sums) if other != rank and piece.own]
        if total.unscheduled - total.suspended > total.own / 2 and rest:
            behind = behind and median(piece.unscheduled / piece.own for piece in rest) < BUSY
        alone = len(stage.ranks) == 1
        changes = [Change(rank, behind, own, others, _reason(total), before=alone)]
        devices = [sums[other].device for other in self._all if other != rank]
        if total.device and devices and all(devices):
            usual = median(devices)
            slow = total.device > self._factor * usual
            changes.append(Change(rank, slow, total.device, usual, by_device=True))
        return [change for change in changes if self._is_new(change)]

    def _expected(self, stage: _Stage, rank: int, sums: Sequence[StepTimes]) -> float:
        """Return the seconds that the rank is expected to need."""
        mates = stage.ranks if len(stage.ranks) > 1 else self._all
        usual = median(sums[other].own for other in mates if other != rank)
        if len(stage.ranks) > 1:
            return usual
        if len(stage.usual) < BLOCKS:
            stage.usual.append(sums[rank].own / usual if usual else 1.0)
            return sums[rank].own
        return usual * median(stage.usual)

    def _is_new(self, change: Change) -> bool:
        key = change.rank, change.by_device
        verdicts = self._verdicts.setdefault(key, deque(maxlen=BLOCKS))
        verdicts.append(change.slow)
        if len(verdicts) < BLOCKS or any(slow != change.slow for slow in verdicts):
            return False
        if change.slow == (key in self._named):
            return False
        (self._named.add if change.slow else self._named.discard)(key)
        return True


def _reason(piece: StepTimes) -> str:
    if piece.reading > piece.own / 2:
        return "most of that is reading its data"
    if piece.unscheduled > piece.own / 2:
        return (
            "most of that it is stopped or waits for a processor, which other programs or a limit "
            "keep from it"
        )
    return ""


PERIOD = 0.3
"""Mean seconds between two samples of the main thread. A sample costs 0.1 ms of CPU time."""

_LATE = 0.02  # seconds of delay that are normal when the thread wakes up on a busy machine

# file whose functions make the main thread wait for its device
_DEVICE_WAITS = "/torch/cuda/streams.py"


class OwnTime(NamedTuple):
    """Times of this process, in seconds.

    Attributes:
        own: time not spent waiting for other ranks.
        reading: time in ``own`` spent waiting for the next batch; 0 if unknown.
        unscheduled: time in ``own`` during which the process was suspended, or ready to run while
            other processes had the processor; 0 if unknown.
        suspended: time in ``unscheduled`` during which the process was suspended, or held the
            interpreter's lock.
    """

    own: float = 0.0
    reading: float = 0.0
    unscheduled: float = 0.0
    suspended: float = 0.0


class OwnTimeMeter:
    """Background thread that measures :class:`OwnTime` between :meth:`resume` and :meth:`pause`.

    It samples at random intervals, because steps may be as long as a fixed interval. A sample
    stands for the whole interval that ends with it. If the thread wakes up late, the process was
    suspended, had no processor, or held the interpreter's lock.
    """

    def __init__(self, period: float = PERIOD) -> None:
        self._period, self._random = period, random.Random(0)
        self._counting = self._closed = False
        self._own = self._reading = self._late = self._suspended = 0.0
        """Totals since the start in seconds, written only by the thread."""
        self._taken = OwnTime()
        self._run_delay = _run_delay()
        self._looked = 0.0  # time of the last sample of the main thread
        self._thread: threading.Thread | None = None

    def resume(self) -> None:
        """Start measuring at the beginning of a step."""
        self._counting = True
        # Not started earlier, because data loader processes must be forked first.
        if self._thread is None:
            lost = "this rank can no longer be found to be slow"
            # set here, because the new thread may have to wait for the interpreter's lock
            self._looked = time.monotonic()
            self._thread = monitor_thread(self._look, "own time", lost)
            self._thread.start()

    def pause(self) -> None:
        """Stop measuring at the end of a step."""
        self._counting = False

    def take(self) -> OwnTime:
        """Return the times measured since the last call."""
        total = OwnTime(self._own, self._reading, self._late, self._suspended)
        before, self._taken = self._taken, total
        delay, self._run_delay = self._run_delay, _run_delay()
        own, reading, late, suspended = (a - b for a, b in zip(total, before, strict=True))
        return OwnTime(own, reading, min(own, max(late, self._run_delay - delay)), suspended)

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _look(self) -> None:
        delay = _run_delay() + _run_delay("thread-self")
        while True:
            pause = self._period * self._random.uniform(0.5, 1.5)
            time.sleep(pause)  # an event with a timeout would cost a quarter more CPU time
            if self._closed:
                return
            now = time.monotonic()
            passed, self._looked = now - self._looked, now
            delay, before = _run_delay() + _run_delay("thread-self"), delay
            if not self._counting:
                continue
            late = max(0.0, passed - pause - _LATE)
            if late > delay - before:  # not for lack of a processor: the process was suspended
                late = passed
                self._suspended += late
            if _waits():
                self._own, self._late = self._own + late, self._late + late
                continue
            self._own, self._late = self._own + passed, self._late + late
            if activity.phase == "data":
                self._reading += passed - late


def _waits() -> bool:
    """Return whether the main thread waits for other ranks or for its device. This is a separate
    function so that the frames, which keep tensors alive, are released at once."""
    frames = frames_of_others()
    main = frames[threading.main_thread().ident or 0]
    waits = where_it_waits(frames) is not None
    return waits or main.f_code.co_filename.endswith(_DEVICE_WAITS)


def _run_delay(task: str = "self") -> float:
    """Return the seconds for which the main thread, or the calling thread with ``thread-self``,
    lacked a processor. Always 0 except on Linux."""
    try:
        return int(Path(f"/proc/{task}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


_SIDE = 2048
_PRODUCTS = 4  # 69 GFLOP in total: 0.1 ms on an H100, 0.5 ms on a V100


class DeviceProbe:
    """Asynchronous timer of matrix products on the GPU. Does nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._factors: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        if device.type == "cuda":
            # Use a separate generator: the global random state must not change, for exact resumes.
            generator = torch.Generator(device).manual_seed(0)
            shape = (_SIDE, _SIDE)
            one, other = (
                torch.randn(shape, generator=generator, device=device).half() for _ in range(2)
            )
            self._factors = one, other, torch.empty_like(one)

    def queue(self) -> None:
        """Queue the matrix products on the current stream."""
        if self._factors is None:
            return
        one, other, product = self._factors
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.mm(one, other, out=product)  # warm-up: raises the clock of an idle GPU
        start.record()
        for _ in range(_PRODUCTS):
            torch.mm(one, other, out=product)
        end.record()
        self._events = start, end

    def seconds(self) -> float:
        """Return the seconds that the last queued products took. Return 0 if none were queued, or
        if they have not finished."""
        if self._events is None or not self._events[1].query():
            return 0.0
        start, end = self._events
        return start.elapsed_time(end) / 1000


_SECONDS = 2.0
"""Target number of seconds between two exchanges. Fast steps exchange at least once per window."""

_LEAST_LOOKS = 5
"""Minimum number of samples of the main thread for a log line to include the ranks' times."""

_SAME_WORK = ("data", "context", "expert", "tensor")  # mesh axes along which ranks do the same work


class Stragglers(Callback):
    """Callback that exchanges the own times of all ranks about every two seconds, without waiting
    for the device, and reports ranks that become slow or recover. Needs more than one rank."""

    def __init__(
        self, config: ResilienceConfig, mesh: Mesh, device: torch.device, report: Reporter
    ) -> None:
        self._mesh, self._device, self._report = mesh, device, report
        self._rule = StragglerRule(
            memberships(mesh.sizes, _SAME_WORK),
            config.straggler_factor,
            config.straggler_window,
        )
        self._window = config.straggler_window
        self._meter, self._probe = OwnTimeMeter(), DeviceProbe(device)
        self._reads: DelayedReads[int] = DelayedReads.on(device)
        """Pending results of exchanges, each with the number of steps that it covers."""
        self._began, self._wall, self._steps = math.nan, 0.0, 0
        self._due: float | None = None
        """Iteration of the next exchange; None before the first step."""
        self._arrived: float = math.inf
        """Iteration at which the pending exchange is read, the same on every rank; else
        infinity."""
        self._shown = 0, [StepTimes(0.0, 0.0) for _ in mesh.world.ranks]
        """Number of steps since the last log line, and the sums of their times. They are reset at
        the first exchange after a log line."""
        self._said = False
        report.at_line.append(self._times)

    def before_step(self, trainer: Trainer) -> None:
        self._began = time.monotonic()
        self._meter.resume()

    @contextlib.contextmanager
    def paused(self, trainer: Trainer) -> Iterator[None]:
        """End the step, and exchange the measured times if an exchange is due."""
        self._meter.pause()
        self._wall, self._steps = self._wall + time.monotonic() - self._began, self._steps + 1
        # The first step is not representative: it compiles, allocates and starts processes.
        if self._due is None:
            self._begin(trainer)
        elif trainer.iteration >= self._due:
            self._exchange(trainer)
        if trainer.iteration >= self._arrived:
            for steps, values in self._reads.due(everything=True):
                self._take(trainer, steps, values)
        yield

    def _times(self, seconds_left: float) -> dict[str, float]:
        """Return the ranks' times for the log line, or nothing if there were too few samples."""
        self._said = True
        steps, pieces = self._shown
        measured = steps and max(piece.wall for piece in pieces) >= _LEAST_LOOKS * PERIOD
        return _times_of(steps, pieces) if measured else {}

    def _begin(self, trainer: Trainer) -> None:
        self._meter.take()
        self._wall, self._steps, self._due = 0.0, 0, trainer.iteration + 1
        self._arrived = math.inf

    def went_back(self, trainer: Trainer) -> None:
        """Discard pending exchanges, because their steps are computed again."""
        for _ in self._reads.due(everything=True):
            pass
        self._begin(trainer)

    def _exchange(self, trainer: Trainer) -> None:
        own = self._meter.take()
        piece = StepTimes(self._wall, *own, self._probe.seconds())
        self._probe.queue()
        rows = torch.zeros(self._mesh.world.size, len(piece), dtype=torch.float64)
        rows[self._mesh.world.rank] = torch.tensor(piece)
        if self._device.type == "cuda":
            rows = rows.pin_memory().to(self._device, non_blocking=True)
        dist.all_reduce(rows)
        self._reads.add(self._steps, rows.flatten())
        self._wall, self._steps, self._due = 0.0, 0, math.inf
        self._arrived = trainer.iteration + self._reads.lag

    def _take(self, trainer: Trainer, steps: int, values: list[float]) -> None:
        width = len(StepTimes._fields)
        pieces = [StepTimes(*values[at : at + width]) for at in range(0, len(values), width)]
        step = max(piece.wall for piece in pieces) / steps
        until = min(math.ceil(_SECONDS / max(step, 1e-9)), self._window)
        self._due, self._arrived = trainer.iteration + max(1, until), math.inf
        shown, sums = self._shown
        if self._said:
            shown, sums, self._said = 0, [StepTimes(0.0, 0.0) for _ in sums], False
        self._shown = shown + steps, [a.plus(b) for a, b in zip(sums, pieces, strict=True)]
        if changes := self._rule.add(steps, pieces):
            self._tell(trainer, changes)

    def _tell(self, trainer: Trainer, changes: list[Change]) -> None:
        """Report the changes, which are the same on every rank. Every rank must call this."""
        names = self._mesh.world.gathered(f"{socket.gethostname()}, process {os.getpid()}")
        for change in changes:
            kind = "WARNING: " if change.slow else ""
            rank = f"rank {change.rank} ({names[change.rank]})"
            self._report.say(f"{kind}iteration {trainer.iteration}: {rank} {change}")
            values = {
                "rank": change.rank,
                "slow": change.slow,
                "by_device": change.by_device,
                "own_seconds": change.own,
                "median_seconds": change.others,
            }
            self._report.event("straggler", trainer.iteration, trainer.consumed_samples, values)

    def __exit__(self, *_: Any) -> None:
        self._meter.close()


def _times_of(steps: int, pieces: Sequence[StepTimes]) -> dict[str, float]:
    """Return the slowest rank, and the slowest, median and fastest own time per step in seconds."""
    owns = [piece.own / steps for piece in pieces]
    most = max(owns)
    return {
        "slowest_rank": owns.index(most),
        "own_seconds_slowest": most,
        "own_seconds_median": median(owns),
        "own_seconds_fastest": min(owns),
    }
