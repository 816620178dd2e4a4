"""Checkpoint writer that blocks training only while the state is copied."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.checkpoint.files import LazyTensor
from megatron.checkpoint.writer import SliceWriter
from megatron.engine.saving import CheckpointWriter, SaveResult
from megatron.engine.train_engine import TrainEngine
from megatron.util.phases import background_groups, phase


class AsyncCheckpointWriter(CheckpointWriter):
    """Writer that copies the state to host memory, and writes the copy in a background thread on
    each rank. The threads communicate in a separate gloo group. Only one save runs at a time."""

    in_background = True

    def __init__(self, engine: TrainEngine, *others: Any, **options: Any) -> None:
        super().__init__(engine, *others, **options)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._running: Future[SaveResult] | None = None
        self._buffers = HostBuffers(engine.device)
        self._device = torch.device("cpu")
        if engine.mesh.world.size > 1:
            minutes = engine.config.parallel.distributed_timeout_minutes
            self._group = dist.new_group(backend="gloo", timeout=timedelta(minutes=minutes))
            background_groups.add(self._group)

    def save(self, iteration: int, counters: dict[str, Any]) -> None:
        """Begin a save, after the previous one has finished. Return when the state is copied."""
        began = time.perf_counter()
        self._wait()
        job = self._begun(iteration, counters, began)
        if job is not None:
            stall = time.perf_counter() - began
            self._running = self._thread.submit(self._write, job, began, stall)

    def slices(self, folder: Path) -> SliceWriter:
        slices = super().slices(folder)
        slices.tensors = self._buffers.copy(slices.tensors)
        return slices

    def finished(self, wait: bool = False) -> list[SaveResult]:
        if self._running is not None and (wait or self._running.done()):
            self._wait()
        return super().finished()

    def close(self) -> list[SaveResult]:
        self._wait()
        self._thread.shutdown()
        return super().close()

    def _wait(self) -> None:
        if self._running is not None:
            with phase("save", str(self.folder)):
                self._results.append(self._running.result())
            self._running = None


class HostBuffers:
    """Host memory for copies of a rank's tensors. Later saves reuse it, so that only the first one
    has to allocate pages. It is pinned if the tensors are on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def copy(
        self, files: Mapping[str, Mapping[str, Tensor | LazyTensor]]
    ) -> dict[str, dict[str, Tensor | LazyTensor]]:
        """Return copies of tensors, by file and key, whose memory the next call reuses. Copies from
        a GPU are asynchronous, and this method waits for all of them before it returns."""
        copied: dict[str, dict[str, Tensor | LazyTensor]] = {
            file: {key: self._copy((file, key), values) for key, values in tensors.items()}
            for file, tensors in files.items()
        }
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return copied

    def _copy(self, place: tuple[str, str], values: Tensor | LazyTensor) -> Tensor:
        buffer = self._buffers.get(place)
        if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
            pinned = self._device.type == "cuda"
            buffer = torch.empty(values.shape, dtype=values.dtype, pin_memory=pinned)
            self._buffers[place] = buffer
        made = values.made() if isinstance(values, LazyTensor) else values
        return buffer.copy_(made, non_blocking=True)
