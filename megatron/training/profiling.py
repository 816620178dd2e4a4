"""Profiles steps of a training run, as its flags ask for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron.config import RunConfig
from megatron.config.profiling import ProfilingConfig
from megatron.engine.train_engine import TrainEngine
from megatron.training.profile_phases import phases_marked, replaced
from megatron.training.profile_recorders import MemoryHistory, NsysRange, Recorder, TorchTrace
from megatron.training.report import say


def start_profiling(
    config: RunConfig, engine: TrainEngine, saves: Any, iteration: int
) -> contextlib.ExitStack:
    """Begins to profile a run, as far as its flags ask for that.

    Args:
        config: the run.
        engine: what trains.
        saves: what saves; not part of a step.
        iteration: iterations that are behind the run.

    Returns:
        What ends it when it is closed: what is being recorded then is written. Empty where nothing
        is profiled.

    Raises:
        ValueError: a flag asks for a GPU where there is none.
    """
    options, ending = config.profiling, contextlib.ExitStack()
    rank = dist.get_rank() if dist.is_initialized() else 0
    on_gpu = engine.device.type == "cuda"
    if options.record_memory_history and not on_gpu:
        raise ValueError("--record-memory-history records a GPU's memory; this run is on the CPU")
    if rank not in options.profile_ranks:
        return ending
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
        return ending
    steps = Steps(recorders, options, iteration, ending.close)
    ending.callback(steps.close)
    if options.profile:
        ending.enter_context(phases_marked(engine, saves))
    ending.enter_context(replaced(engine, "train_step", steps.around(engine.train_step)))
    return ending


def under_nsys(options: ProfilingConfig, on_gpu: bool) -> bool:
    """Whether nsys records this process, and shall."""
    # The variable by which nsys tells its processes; NVTX.jl and GROMACS look for it as well.
    found = "NSYS_PROFILING_SESSION_ID" in os.environ
    return found and on_gpu and not options.use_pytorch_profiler


class Steps:
    """Tells recorders when the steps begin that they are to record.

    Args:
        recorders: what records them.
        options: which steps.
        iteration: iterations that are behind the run.
        end: ends all of the profiling; called after the last step that is recorded.
    """

    def __init__(
        self,
        recorders: list[Recorder],
        options: ProfilingConfig,
        iteration: int,
        end: Callable[[], None],
    ) -> None:
        self.recorders, self.options, self.iteration, self.end = recorders, options, iteration, end
        self.first = max(options.profile_step_start, iteration)
        self.recording = False

    def around(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """The step, recorded when its turn comes."""

        def step(*args: Any, **kwargs: Any) -> Any:
            self.begin()
            return train_step(*args, **kwargs)

        return step

    def begin(self) -> None:
        """A step begins; the one before has come to its end."""
        if self.recording and self.iteration == self.options.profile_step_end:
            self.end()
        elif self.recording:
            self._tell("step")
        elif self.iteration == self.first:
            self.recording = True
            self._tell("start", self.iteration)
        elif self.iteration == self.first - 1:
            self._tell("prepare")
        self.iteration += 1

    def close(self) -> None:
        """Ends a recording."""
        if self.recording:
            self.recording = False
            self._tell("stop", self.iteration)
        self._tell("close")

    def _tell(self, what: str, *args: Any) -> None:
        for recorder in self.recorders:
            getattr(recorder, what)(*args)
