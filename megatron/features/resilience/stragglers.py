"""Which rank the others wait for, judged by what each computes and reads itself."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

BLOCKS = 5
"""Parts of a window; a rank must be slow in every one, so that a single pause names nobody."""

SECONDS = 60.0
"""Of steps that a window has at least, whatever their number: processes of a busy machine take
turns at being slow for shorter times, and a part of it needs forty looks at the main thread: with
fifteen, equal ranks looked different once in a thousand windows."""

BUSY = 0.2
"""Of the others' own time without a processor: the machine has too few of them for all its ranks,
and which of them gets none for how long means nothing."""

LEAST_SHARE = 0.1
"""Of a step that a rank must be behind the median: less is hardly worth a message."""


class StepTimes(NamedTuple):
    """Some steps, as one rank measured them; sums over the steps, in seconds.

    Attributes:
        wall: from the beginnings of the steps to their ends.
        own: of that, without waiting for other ranks.
        reading: of ``own``, waiting for the next batch.
        unscheduled: of ``own``, stopped or without a processor.
        device: of a product of matrices on the rank's GPU; 0 where that is not measured.
    """

    wall: float
    own: float
    reading: float = 0.0
    unscheduled: float = 0.0
    device: float = 0.0

    def plus(self, other: StepTimes) -> StepTimes:
        """Both, one after the other; of the device what was faster."""
        both = self.device and other.device
        return StepTimes(
            self.wall + other.wall,
            self.own + other.own,
            self.reading + other.reading,
            self.unscheduled + other.unscheduled,
            min(self.device, other.device) if both else self.device or other.device,
        )


@dataclass(frozen=True)
class Change:
    """A rank is slow from now on, or no longer is.

    Attributes:
        slow: whether it is.
        own, others: seconds of its own for a step, and those of the median rank; with ``by_device``
            of a product of matrices on its GPU.
        reason: what most of ``own`` is; empty if that is not known.
        before: in a stage of a single rank, ``others`` is what it needed itself, in proportion to
            the other stages.
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
    """Ranks that do the same work."""

    ranks: Sequence[int]
    usual: list[float] = field(default_factory=list)
    """Of a single rank: its own time relative to the median of all, in its first blocks."""


class StragglerRule:
    """Finds ranks that are slower than others of their pipeline stage, and for long.

    Args:
        stages: the ranks of each pipeline stage; only those of one do the same work. One that is
            alone is compared with what it needed at first, relative to the other stages.
        factor: how many times as long as the median of the others is slow; 0 names nobody.
        window: number of steps over which a rank must be; also :data:`SECONDS` at least.
    """

    def __init__(self, stages: Sequence[Sequence[int]], factor: float, window: int) -> None:
        self._stages = [_Stage(ranks) for ranks in stages]
        self._factor, self._window = factor, window
        self._all = sorted(rank for ranks in stages for rank in ranks)
        self._steps, self._sums = 0, [StepTimes(0.0, 0.0) for _ in self._all]
        self._verdicts: dict[tuple[int, bool], deque[bool]] = {}
        self._named: set[tuple[int, bool]] = set()

    def add(self, steps: int, pieces: Sequence[StepTimes]) -> list[Change]:
        """Takes the same steps of every rank, in order; returns what changes with them."""
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
        found = sums[rank]
        own, others = found.own / steps, self._expected(stage, rank, sums) / steps
        step = max(piece.wall for piece in sums) / steps
        behind = own > self._factor * others and own - others > LEAST_SHARE * step
        rest = [piece for other, piece in enumerate(sums) if other != rank and piece.own]
        if found.unscheduled > found.own / 2 and rest:
            behind = behind and median(piece.unscheduled / piece.own for piece in rest) < BUSY
        alone = len(stage.ranks) == 1
        changes = [Change(rank, behind, own, others, _reason(found), before=alone)]
        devices = [sums[other].device for other in self._all if other != rank]
        if found.device and devices and all(devices):
            usual = median(devices)
            slow = found.device > self._factor * usual
            changes.append(Change(rank, slow, found.device, usual, by_device=True))
        return [change for change in changes if self._is_new(change)]

    def _expected(self, stage: _Stage, rank: int, sums: Sequence[StepTimes]) -> float:
        """Seconds that the rank should have needed."""
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
