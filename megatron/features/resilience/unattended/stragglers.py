"""Compares the ranks of a run by what each of them computes and reads itself, and names those that
the others wait for."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megatron.features.resilience.device_speed import DeviceProbe
from megatron.features.resilience.flags import ResilienceConfig
from megatron.features.resilience.own_time import OwnTimeMeter
from megatron.features.resilience.stragglers import (
    Change,
    StepTimes,
    StragglerRule,
)
from megatron.parallel.mesh import Mesh, memberships
from megatron.training.report import Reporter
from megatron.training.stopping import DelayedReads
from megatron.training.trainer import Callback, Trainer

_SECONDS = 2.0
"""Of steps between two exchanges: one costs as much as a small collective. A window of fast steps
has one too, or steps that become slow would not be seen for long."""

_SAME_WORK = ("data", "context", "expert", "tensor")
"""The axes along which ranks do the same work."""


class Stragglers(Callback):
    """Exchanges the own times of all ranks every two seconds or so, without waiting for the device,
    and tells ``report`` of them, and of ranks that become slow or no longer are. It must be called
    before ``report``; for several ranks only."""

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
        """Of what the ranks exchanged, with the number of steps."""
        self._began, self._wall, self._steps = math.nan, 0.0, 0
        self._due: float | None = None
        """Iteration after which the next exchange is; None before the first step."""
        self._arrived: float = math.inf
        """Iteration after which the exchange is read, the same on every rank: what follows from it
        is done together."""
        self._shown = 0, [StepTimes(0.0, 0.0) for _ in mesh.world.ranks]
        """Steps since the last log line, and their sums, or those of the line before."""
        self._said = False
        report.at_line.append(self._times)

    def before_step(self, trainer: Trainer) -> None:
        self._began = time.monotonic()
        self._meter.resume()

    @contextlib.contextmanager
    def paused(self, trainer: Trainer) -> Iterator[None]:
        """Ends the step, and exchanges what was measured if that is due."""
        self._meter.pause()
        self._wall, self._steps = self._wall + time.monotonic() - self._began, self._steps + 1
        if self._due is None:  # the first step compiles, allocates, and starts processes
            self._begin(trainer)
        elif trainer.iteration >= self._due:
            self._exchange(trainer)
        if trainer.iteration >= self._arrived:
            for steps, values in self._reads.due(everything=True):
                self._take(trainer, steps, values)
        yield

    def _times(self, seconds_left: float) -> dict[str, float]:
        """For the log line."""
        self._said = True
        return _times_of(*self._shown) if self._shown[0] else {}

    def _begin(self, trainer: Trainer) -> None:
        self._meter.take()
        self._wall, self._steps, self._due = 0.0, 0, trainer.iteration + 1
        self._arrived = math.inf

    def went_back(self, trainer: Trainer) -> None:
        """Steps that are done again count again."""
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
        """Every rank has found the same changes."""
        names: list[Any] = [None] * self._mesh.world.size
        dist.all_gather_object(names, f"{socket.gethostname()}, process {os.getpid()}")
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
    """Seconds that the ranks needed for a step, given their sums over some steps."""
    owns = [piece.own / steps for piece in pieces]
    most = max(owns)
    return {
        "slowest_rank": owns.index(most),
        "own_seconds_slowest": most,
        "own_seconds_median": median(owns),
        "own_seconds_fastest": min(owns),
    }
