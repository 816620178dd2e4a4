"""Profiles steps of a training run, as its flags ask for."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from megatron.config import RunConfig
from megatron.config.output import ProfilingConfig
from megatron.engine.train_engine import TrainEngine
from megatron.training.profile_phases import phases_marked
from megatron.training.profile_recorders import MemoryHistory, NsysRange, Recorder, TorchTrace
from megatron.training.report import say
from megatron.training.trainer import Callback, Trainer


def profiling(
    config: RunConfig, engine: TrainEngine, checkpoints: Any, iteration: int
) -> list[Callback]:
    """What profiles a run, as far as its flags ask for that.

    Args:
        config: the run.
        engine: what trains.
        checkpoints: what saves; not part of a step.
        iteration: iterations done before the run.

    Raises:
        ValueError: a flag asks for a GPU where there is none.
    """
    options = config.profiling
    rank, on_gpu = engine.mesh.world.rank, engine.device.type == "cuda"
    if options.record_memory_history and not on_gpu:
        raise ValueError("--record-memory-history records a GPU's memory; this run is on the CPU")
    if rank not in options.profile_ranks:
        return []
    recorders: list[Recorder] = []
    if options.record_memory_history:
        recorders.append(MemoryHistory(options, rank))
    if options.profile and iteration >= options.profile_step_end:
        say(
            f"--profile-step-end {options.profile_step_end}: nothing to profile, the run goes on "
            f"after iteration {iteration}"
        )
    elif options.profile and under_nsys(options, on_gpu):
        recorders.append(NsysRange())
    elif options.profile:
        recorders.append(TorchTrace(config, engine.device, rank))
    if not recorders:
        return []
    marks = phases_marked(engine, checkpoints) if options.profile else contextlib.nullcontext()
    return [Profiler(recorders, options, iteration, marks)]


def under_nsys(options: ProfilingConfig, on_gpu: bool) -> bool:
    """Whether nsys records this process, and shall."""
    # The variable by which nsys tells its processes; NVTX.jl and GROMACS look for it as well.
    found = "NSYS_PROFILING_SESSION_ID" in os.environ
    return found and on_gpu and not options.use_pytorch_profiler


class Profiler(Callback):
    """Tells recorders when the steps begin that they are to record.

    Args:
        recorders: what records them.
        options: which steps.
        iteration: iterations done before the run.
        marks: entered as long as there may be something to record.
    """

    def __init__(
        self,
        recorders: list[Recorder],
        options: ProfilingConfig,
        iteration: int,
        marks: contextlib.AbstractContextManager[Any] | None = None,
    ) -> None:
        self.recorders, self.options, self.iteration = recorders, options, iteration
        self.first = max(options.profile_step_start, iteration)
        self.recording = False
        self._held = contextlib.ExitStack()
        self._marks = marks or contextlib.nullcontext()

    def __enter__(self) -> Profiler:
        self._held.callback(self._close)
        self._held.enter_context(self._marks)
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Writes what is being recorded."""
        self._held.close()

    def training_ended(self, trainer: Trainer, reason: str | None) -> None:
        """Writes what is being recorded."""
        self._held.close()

    def before_step(self, trainer: Trainer) -> None:
        """A step begins; the one before has come to its end."""
        if self.recording and self.iteration == self.options.profile_step_end:
            self._held.close()
        elif self.recording:
            self._tell("step")
        elif self.iteration == self.first:
            self.recording = True
            self._tell("start", self.iteration)
        elif self.iteration == self.first - 1:
            self._tell("prepare")
        self.iteration += 1

    def _close(self) -> None:
        if self.recording:
            self.recording = False
            self._tell("stop", self.iteration)
        self._tell("close")

    def _tell(self, what: str, *args: Any) -> None:
        for recorder in self.recorders:
            getattr(recorder, what)(*args)
