"""The steps of one contestant: warm-up, rounds that are timed, and some that are traced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from contestants.registry import NoMoreSteps
from contestants.worker import Clock

from gpu_suite.shapes import Steps
from megatron.apps.profiling.breakdown import break_down
from megatron.apps.profiling.tables import breakdown_text
from megatron.apps.profiling.trace import TraceError, read_trace

KERNELS = 40
"""Number of a trace's kernels and products that are kept, those that take longest."""


class Stepping:
    """Callback after every step of a contestant.

    Args:
        steps: how many there are.
        trace: file of a trace of further steps; None without one.
        about: kept in the trace: ``matmul_peak_flops`` where it is known.
    """

    def __init__(self, steps: Steps, trace: Path | None, about: dict[str, Any]) -> None:
        self.steps, self.trace, self.about = steps, trace, about
        self.done = 0
        self.losses: list[float | None] = []
        self.grad_norms: list[float | None] = []
        self.rounds: list[dict[str, float]] = []
        self._unread: list[tuple[Any, Any]] = []
        self._clock: Clock | None = None
        self._profiler: torch.profiler.profile | None = None

    def after_step(self, loss: Any, grad_norm: Any = None, /) -> None:
        """Counts, and measures. Raises NoMoreSteps after the last step."""
        self.done += 1
        self._unread.append((loss, grad_norm))
        if self._profiler is not None:
            self._traced(self._profiler)
            return
        timed = self.done - self.steps.warmup
        if timed < 0 or timed % self.steps.each:
            return
        if self._clock is not None:
            self.rounds.append(self._clock.stop())
        self._read()
        if self.done < self.steps.total:
            self._clock = Clock()
        elif self.trace is None:
            raise NoMoreSteps
        else:
            self._profiler = _profiler(self.steps.traced)
            self._profiler.start()

    def _traced(self, profiler: torch.profiler.profile) -> None:
        if self.done == self.steps.total + self.steps.traced:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            profiler.add_metadata_json("megatron", json.dumps(self.about))
            profiler.stop()
            self._read()
            assert self.trace is not None
            self.trace.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self.trace))
            raise NoMoreSteps
        profiler.step()

    def _read(self) -> None:
        for loss, norm in self._unread:
            self.losses.append(None if loss is None else float(loss))
            self.grad_norms.append(None if norm is None else float(norm))
        self._unread = []


def _profiler(steps: int) -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(wait=0, warmup=0, active=steps, repeat=1),
        record_shapes=True,
    )


def split(trace: Path) -> dict[str, Any]:
    """Split the time of the traced steps: the table of ``tools/profile_step.py``, its numbers, and
    the kernels and products that take longest, [name, phase, calls, milliseconds]."""
    try:
        found = break_down(read_trace(trace))
    except TraceError as error:
        return {"failed": str(error)}
    except Exception as error:  # rented minutes are not lost to an error of the table
        return {"failed": repr(error)}
    named = {
        title: [[each.name, each.phase, each.calls, each.time / 1e3] for each in entries[:KERNELS]]
        for title, entries in (("kernels", found.operators), ("products", found.gemms))
    }
    return {**found.to_dict(), "table": breakdown_text(found), **named}
