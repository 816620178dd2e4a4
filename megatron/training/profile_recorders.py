"""What records the steps of a run that is profiled: torch's profiler, nsys, the GPU's allocator."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from megatron.config import RunConfig
from megatron.config.output import ProfilingConfig
from megatron.profiling.split import split
from megatron.profiling.table import split_text
from megatron.profiling.trace import read_trace
from megatron.training.flops import measure_matmul_peak
from megatron.training.report import say
from megatron.util.files import replacing


class Recorder:
    """Records steps that follow on one another; what it does not define does nothing."""

    def prepare(self) -> None:
        """The step before the first recorded one begins."""

    def start(self, iteration: int) -> None:
        """The first recorded step begins.

        Args:
            iteration: iterations before it.
        """

    def step(self) -> None:
        """The next recorded step begins."""

    def stop(self, iteration: int) -> None:
        """The last recorded step has come to its end.

        Args:
            iteration: which that is.
        """

    def close(self) -> None:
        """Profiling ends, perhaps before a step was recorded."""


class TorchTrace(Recorder):
    """torch's profiler: a trace file, and a table of where the time goes.

    Args:
        config: the run.
        device: where it trains.
        rank: rank of this process.
    """

    def __init__(self, config: RunConfig, device: torch.device, rank: int) -> None:
        self.options, self.device, self.rank = config.profiling, device, rank
        self.dtype = torch.bfloat16 if config.precision.bf16 else torch.float32
        if config.precision.fp16:
            self.dtype = torch.float16
        assert self.options.profile_dir is not None
        self.folder = Path(self.options.profile_dir)
        self.folder.mkdir(parents=True, exist_ok=True)
        if config.fast_paths.torch_compile:
            _name_compiled_kernels()
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profiler = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(
                wait=0, warmup=1, active=2**62, repeat=1, skip_first=0
            ),
            record_shapes=True,
            profile_memory=True,
        )
        self.begun = False

    def prepare(self) -> None:
        """Starts the profiler, whose first events are slow, and measures what products reach."""
        # Twice, because others may use the machine at the time of one.
        self.peak = max(measure_matmul_peak(self.dtype, self.device, seconds=0.3) for _ in range(2))
        self.profiler.start()
        self.begun = True

    def start(self, iteration: int) -> None:
        """From now on events are kept."""
        if not self.begun:
            self.prepare()
        self.step()
        self.first = iteration
        about = {"matmul_peak_flops": self.peak, "iterations_before": iteration}
        self.profiler.add_metadata_json("megatron", json.dumps(about))

    def step(self) -> None:
        """The next step begins."""
        self.profiler.step()

    def stop(self, iteration: int) -> None:
        """Writes the trace, and on the first rank the table."""
        self.begun = False
        self.profiler.stop()
        path = self.folder / f"rank{self.rank}-step{self.first}-{iteration}.json.gz"
        with replacing(path, ".json.gz") as part:
            self.profiler.export_chrome_trace(str(part))
        if self.rank == self.options.profile_ranks[0]:
            say(
                f"--profile: {path}; https://ui.perfetto.dev shows it\n"
                f"{split_text(split(read_trace(path)))}"
            )

    def close(self) -> None:
        """Ends the profiler if the run ended before the first recorded step."""
        if self.begun:
            self.begun = False
            self.profiler.stop()


class NsysRange(Recorder):
    """nsys's capture range (``nsys profile --capture-range cudaProfilerApi``), with a range of NVTX
    for every operator and phase."""

    def __init__(self) -> None:
        self._ranges = torch.autograd.profiler.emit_nvtx(record_shapes=True)

    def start(self, iteration: int) -> None:
        """Tells nsys to record, once the device is through with earlier steps."""
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        self._ranges.__enter__()

    def stop(self, iteration: int) -> None:
        """Tells nsys that it is enough."""
        self._ranges.__exit__(None, None, None)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


class MemoryHistory(Recorder):
    """Every allocation of the GPU with the Python lines that asked for it, from now on.

    Args:
        options: where to, and until when.
        rank: rank of this process.
    """

    entries = 100_000
    """Allocations that are kept, the newest."""

    def __init__(self, options: ProfilingConfig, rank: int) -> None:
        path = Path(options.memory_snapshot_path)
        first = rank == options.profile_ranks[0]
        self.path = path if first else path.with_stem(f"{path.stem}-rank{rank}")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.recording = True
        torch.cuda.memory._record_memory_history(max_entries=self.entries)

    def start(self, iteration: int) -> None:
        """It records already."""

    def stop(self, iteration: int) -> None:
        """Writes the file."""
        self.close()

    def close(self) -> None:
        """Writes the file, once."""
        if not self.recording:
            return
        self.recording = False
        try:
            with replacing(self.path) as part:
                torch.cuda.memory._dump_snapshot(str(part))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        say(f"--record-memory-history: {self.path}; https://pytorch.org/memory_viz shows it")


def _name_compiled_kernels() -> None:
    """Has inductor's kernels for CPUs appear in traces; they are compiled later."""
    import torch._inductor.config

    torch._inductor.config.cpp.enable_kernel_profile = True
