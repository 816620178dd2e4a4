"""Metrics of a log interval: the steps' values, memory use, and the remaining time."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.data.samples import SequenceLengths
from megatron.training.registry import METRICS, IntervalMetrics, Reduce, RunMetric
from megatron.training.trainer import Step

Value = torch.Tensor | float | None


class TimeLeft:
    """Estimates the seconds until the end of a run: the remaining iterations at the mean speed of
    recent log intervals, including evaluations and saves. The first interval, which includes
    compilation, is left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lines: deque[tuple[int, float]] = deque(maxlen=_INTERVALS)

    def begin(self, iteration: int) -> None:
        """Start the clock at a process's first step, or again after the training went back."""
        self._lines.clear()
        self._lines.append((iteration, self._clock()))
        self._first = True

    def seconds(self, iteration: int, train_iters: int) -> float:
        """Return the estimate. Called once per log line."""
        self._lines.append((iteration, self._clock()))
        (earlier, then), (_, now) = self._lines[0], self._lines[-1]
        speed = (now - then) / max(iteration - earlier, 1)
        if self._first:
            self._lines.popleft()
            self._first = False
        return speed * max(train_iters - iteration, 0)


_INTERVALS = 20
"""Maximum number of intervals for the mean speed."""


class MemoryUse(NamedTuple):
    """Peak memory of one process since its start, in bytes. ``allocated`` is for tensors on a CUDA
    device, or the resident set size on CPU. ``reserved`` is what torch's CUDA allocator holds."""

    allocated: int
    reserved: int | None


def memory_use(device: torch.device) -> MemoryUse:
    """Return the peak memory of this process on ``device``."""
    if device.type == "cuda":
        return MemoryUse(
            allocated=torch.cuda.max_memory_allocated(device),
            reserved=torch.cuda.max_memory_reserved(device),
        )
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return MemoryUse(allocated=peak * unit, reserved=None)


class IntervalMeter:
    """Collects the metrics of a log interval. The first interval's clock starts at construction.

    Args:
        devices: number of devices in the run, one per rank.
        peak_flops: peak FLOP/s of one device; None if unknown.
        clock: function that returns the time in seconds.
    """

    def __init__(
        self,
        train_iters: int,
        device: torch.device,
        devices: int,
        peak_flops: float | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._train_iters, self._device, self._devices = train_iters, device, devices
        self._peak_flops, self._clock = peak_flops, clock
        self._metrics = dict(METRICS)
        self._recorded: dict[str, list[Value]] = {}
        self._over_ranks: set[str] = set()
        self._losses: tuple[str, ...] = ()
        self._steps = 0
        self._started = clock()

    def record(
        self,
        name: str,
        value: Value,
        reduce: Reduce = "last",
        unit: str = "",
        over_ranks: bool = False,
    ) -> None:
        """Add a value of the current step. A tensor stays on the device until the interval ends.

        Args:
            value: a scalar, the same on all ranks unless ``over_ranks``; None if unknown.
            reduce: reduction over the interval's steps, for a name that is not in :data:`METRICS`.
            unit: unit for the console, for such a name.
            over_ranks: whether to reduce over ranks too. Every rank must then record the value.
        """
        metric = self._metrics.get(name)
        if metric is None:
            label = name.replace("_", " ") + (f" ({unit})" if unit else "")
            metric = self._metrics[name] = RunMetric(name, unit, reduce, label, curve=True)
        if over_ranks:
            assert metric.reduce in _OVER_RANKS, f"{name}: no reduction {reduce} over ranks"
            self._over_ranks.add(name)
        values = self._recorded.setdefault(name, [])
        if metric.reduce == "last":
            values.clear()
        values.append(value)

    def add(
        self,
        step: Step,
        flops: torch.Tensor | float,
        recomputed_flops: torch.Tensor | float = 0.0,
        lengths: SequenceLengths | None = None,
    ) -> None:
        """Add an optimizer step without reading from the device. ``flops`` are the model's FLOPs
        and ``recomputed_flops`` those of recomputed activations, for samples of maximum length.
        ``lengths`` tells how many of the tokens count, by default all. The sequence length is
        recorded if it grows during the run."""
        record, result = self.record, step.result
        lengths = lengths or SequenceLengths(step.seq_length)
        before, fed = lengths.tokens(step.first_sample), step.samples * step.seq_length
        counted: torch.Tensor | float = lengths.tokens(step.first_sample + step.samples) - before
        share: torch.Tensor | float = 1.0
        if step.counts is not None:
            # An estimate: attention to short samples costs less than their share of the tokens.
            share, counted = step.counts.fed / fed, step.counts.fed
            record("trained_tokens_per_second", step.counts.trained)
        if lengths.grows:
            record("seq_length", float(step.seq_length))
        for name, length in lengths.shown(step.iteration - 1).items():
            record(name, float(length))
        self._steps += 1
        self._losses = tuple(result.losses)
        # Losses are logged in float32, whatever dtype they are summed in.
        record("loss", result.loss.float())
        for name, loss in result.losses.items() if len(result.losses) > 1 else ():
            record(name, loss.float(), "mean")
        record("grad_norm", result.grad_norm)
        record("learning_rate", step.learning_rate)
        record("weight_decay", step.weight_decay)
        record("global_batch_size", step.samples)
        record("loss_scale", result.loss_scale)
        record("skipped_steps", result.skipped)
        record("nan_steps", result.loss.float())
        record("samples_per_second", step.samples)
        record("tokens_per_second_per_device", counted / self._devices)
        work, every = flops * share / self._devices, (flops + recomputed_flops) * share
        record("tflops_per_device", work / 1e12)
        peak = self._peak_flops
        record("mfu", work / peak if peak else None)
        record("hfu", every / self._devices / peak if peak else None)
        if result.zeros is not None:
            record("num_zeros", result.zeros)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time within this context (evaluations and saves) from the interval."""
        start = self._clock()
        try:
            yield
        finally:
            self._started += self._clock() - start

    def finish(
        self, *, iteration: int, consumed_samples: int, consumed_tokens: int
    ) -> IntervalMetrics:
        """End the interval after its last step has finished, and start the next. Collective."""
        assert self._steps, "an interval without steps"
        read = iter(numbers([value for values in self._recorded.values() for value in values]))
        now = self._clock()
        # A coarse clock can measure 0 seconds for a tiny step.
        seconds = max(now - self._started, 1e-9)
        values = {
            name: _reduced(self._metrics[name].reduce, [next(read) for _ in recorded], seconds)
            for name, recorded in self._recorded.items()
        }
        if self._devices > 1:
            for name in sorted(self._over_ranks & values.keys()):
                values[name] = self._reduced_over_ranks(name, values[name])
        memory = memory_use(self._device)
        values["memory_allocated_bytes"] = memory.allocated
        values["memory_reserved_bytes"] = memory.reserved
        values["seconds_per_iteration"] = seconds / self._steps
        losses = {name: values.pop(name, values["loss"]) for name in self._losses}
        self._recorded, self._steps, self._started = {}, 0, now
        return IntervalMetrics(
            iteration,
            self._train_iters,
            consumed_samples,
            consumed_tokens,
            self._devices,
            losses,
            values,
            self._metrics,
        )

    def _reduced_over_ranks(self, name: str, value: Any) -> float:
        total = torch.tensor(value, dtype=torch.float64, device=self._device)
        reduce = self._metrics[name].reduce
        dist.all_reduce(total, dist.ReduceOp.MAX if reduce == "max" else dist.ReduceOp.SUM)
        return float(total) / (self._devices if reduce == "mean" else 1)


_OVER_RANKS = frozenset({"mean", "sum", "max", "rate"})


def _reduced(reduce: Reduce, values: Sequence[Any], seconds: float) -> Any:
    if reduce == "last" or values[-1] is None:
        return values[-1]
    if reduce == "mean":
        finite = [value for value in values if math.isfinite(value)]
        return math.fsum(finite) / len(finite) if finite else math.nan
    if reduce == "not finite":
        return sum(not math.isfinite(value) for value in values)
    if reduce == "max":
        return max(values)
    total = sum(values)
    return round(total) if reduce == "count" else total / seconds if reduce == "rate" else total


def numbers(values: Sequence[Value]) -> list[Any]:
    """Return the values with tensors as Python numbers. All tensors are read at once."""
    tensors = [value.detach().reshape(()) for value in values if torch.is_tensor(value)]
    # float32 and float64 convert to float64 exactly, and so do counts.
    wide = [each if each.dtype == torch.float32 else each.double() for each in tensors]
    read = iter(torch.stack([each.to(wide[0].device) for each in wide]).tolist() if wide else ())
    return [next(read) if torch.is_tensor(value) else value for value in values]
