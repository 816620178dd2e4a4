"""Recording of some steps of a run with torch's profiler, NVIDIA's nsys, or CUDA's memory history.

The engine and checkpoints mark the phases of a step with ``record_function("megatron::...")``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch

from megatron.apps.profiling.breakdown import break_down
from megatron.apps.profiling.flags import ProfilingConfig
from megatron.apps.profiling.tables import breakdown_text
from megatron.apps.profiling.trace import read_trace
from megatron.config import RunConfig
from megatron.engine.train_engine import TrainEngine
from megatron.features.measured_peak.products import measure_matmul_peak
from megatron.training.report import say
from megatron.training.trainer import Callback, Trainer
from megatron.util.files import replacing

logger = logging.getLogger(__name__)


def profiling(config: RunConfig, engine: TrainEngine, iteration: int) -> list[Callback]:
    """Return the callback that profiles a run after ``iteration`` iterations, or an empty list if
    the flags do not select this rank or nothing remains to profile. Raises ValueError if a flag
    requires a GPU and the run has none."""
    options = config.section(ProfilingConfig)
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
            f"--profile-step-end {options.profile_step_end}: nothing to profile, the run continues "
            f"after iteration {iteration}"
        )
    elif options.profile and under_nsys(options, on_gpu):
        recorders.append(NsysRange())
    elif options.profile:
        recorders.append(TorchTrace(config, engine.device, rank))
    return [Profiler(recorders, options, iteration)] if recorders else []


def under_nsys(options: ProfilingConfig, on_gpu: bool) -> bool:
    """Return whether nsys records this process and torch's profiler was not requested."""
    # nsys sets this variable in its processes. NVTX.jl and GROMACS check it as well.
    recorded = "NSYS_PROFILING_SESSION_ID" in os.environ
    plain = options.profile == "auto" and not options.use_pytorch_profiler
    return recorded and on_gpu and plain


class Recorder:
    """Recorder of consecutive steps. Its methods do nothing unless overridden."""

    def prepare(self) -> None:
        """Prepare, before the step that precedes the first recorded step."""

    def start(self, iteration: int) -> None:
        """Start recording, before the first recorded step and after ``iteration`` iterations."""

    def step(self) -> None:
        """Mark the start of each further recorded step."""

    def stop(self, iteration: int) -> None:
        """Stop recording, after the last recorded step, which is ``iteration``."""

    def close(self) -> None:
        """Release resources when profiling ends, possibly before a step was recorded."""


class Profiler(Callback):
    """Callback that starts and stops recorders. ``iteration`` is the number of iterations that the
    run has already completed."""

    def __init__(self, recorders: list[Recorder], options: ProfilingConfig, iteration: int) -> None:
        self.recorders, self.options, self.iteration = recorders, options, iteration
        self.first = max(options.profile_step_start, iteration)
        self.recording = False
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Profiler:
        self._open.callback(self._close)
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self._open.close()

    def training_ended(self, trainer: Trainer, reason: str | None) -> None:
        self._open.close()

    def before_step(self, trainer: Trainer) -> None:
        if self.recording and self.iteration == self.options.profile_step_end:
            self._open.close()
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

    def _tell(self, event: str, *args: Any) -> None:
        """Call a method of all recorders. A profile that cannot be written does not end the run."""
        for recorder in list(self.recorders):
            try:
                getattr(recorder, event)(*args)
            except (OSError, RuntimeError, ValueError) as error:
                if event not in ("stop", "close"):
                    raise
                logger.warning(
                    "--profile: what was recorded cannot be written to %s (%s); training continues",
                    self.options.profile_dir,
                    error,
                )
                self.recorders.remove(recorder)


class TorchTrace(Recorder):
    """Recorder that uses torch's profiler, writes a trace file and prints a table of how the time
    is spent."""

    def __init__(self, config: RunConfig, device: torch.device, rank: int) -> None:
        self.options, self.device, self.rank = config.section(ProfilingConfig), device, rank
        self.dtype = torch.bfloat16 if config.precision.bf16 else torch.float32
        if config.precision.fp16:
            self.dtype = torch.float16
        assert self.options.profile_dir is not None
        self.folder = Path(self.options.profile_dir)
        self.folder.mkdir(parents=True, exist_ok=True)
        if config.fast_paths.torch_compile == "on" and device.type == "cpu":
            # Inductor's CPU kernels appear in traces only if they are compiled with profiling code.
            from torch._inductor import config as inductor

            inductor.cpp.enable_kernel_profile = True
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profiler = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=2**62, repeat=1),
            record_shapes=True,
            profile_memory=True,
            with_stack=self.options.profile == "pt-full",
        )
        self.begun = False

    def prepare(self) -> None:
        """Measure the peak GEMM rate, and start the profiler, whose first events are slow."""
        # Measure twice, in case other programs interfere with one measurement.
        self.peak = max(measure_matmul_peak(self.dtype, self.device, seconds=0.3) for _ in range(2))
        self.profiler.start()
        self.begun = True

    def start(self, iteration: int) -> None:
        if not self.begun:
            self.prepare()
        self.step()
        self.first = iteration
        about = {"matmul_peak_flops": self.peak, "iterations_before": iteration}
        self.profiler.add_metadata_json("megatron", json.dumps(about))

    def step(self) -> None:
        self.profiler.step()

    def stop(self, iteration: int) -> None:
        """Write the trace, and print the table on the first profiled rank."""
        self.close()
        path = self.folder / f"rank{self.rank}-step{self.first}-{iteration}.json.gz"
        with replacing(path, ".json.gz") as part:
            self.profiler.export_chrome_trace(str(part))
        if self.rank == self.options.profile_ranks[0]:
            say(
                f"--profile: {path}; open it at https://ui.perfetto.dev\n"
                f"{breakdown_text(break_down(read_trace(path)))}"
            )

    def close(self) -> None:
        if self.begun:
            self.begun = False
            self.profiler.stop()


class NsysRange(Recorder):
    """Recorder that marks nsys's capture range (``nsys profile --capture-range cudaProfilerApi``),
    with an NVTX range for every operator and phase."""

    def __init__(self) -> None:
        self._ranges = torch.autograd.profiler.emit_nvtx(record_shapes=True)

    def start(self, iteration: int) -> None:
        torch.cuda.synchronize()  # keeps work from earlier steps out of the recording
        torch.cuda.profiler.start()
        self._ranges.__enter__()

    def stop(self, iteration: int) -> None:
        self._ranges.__exit__(None, None, None)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


class MemoryHistory(Recorder):
    """Recorder of all GPU allocations since its creation, with the Python lines that made them."""

    entries = 100_000
    """Maximum number of allocations to keep. The oldest are dropped."""

    def __init__(self, options: ProfilingConfig, rank: int) -> None:
        path = Path(options.memory_snapshot_path)
        first = rank == options.profile_ranks[0]
        self.path = path if first else path.with_stem(f"{path.stem}-rank{rank}")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.recording = True
        torch.cuda.memory._record_memory_history(max_entries=self.entries)

    def stop(self, iteration: int) -> None:
        self.close()

    def close(self) -> None:
        """Write the snapshot file. Only the first call has an effect."""
        if not self.recording:
            return
        self.recording = False
        try:
            with replacing(self.path) as part:
                torch.cuda.memory._dump_snapshot(str(part))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        say(f"--record-memory-history: {self.path}; open it at https://pytorch.org/memory_viz")
