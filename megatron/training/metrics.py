"""Measurements of a run: evaluations, the numbers of its log intervals, its time left, and the
memory and peak rates of its devices."""

from __future__ import annotations

import math
import re
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from megatron.training.registry import METRICS, IntervalMetrics, Reduce, RunMetric

if TYPE_CHECKING:
    from megatron.training.trainer import Step

Value = torch.Tensor | float | None


class Reported(Protocol):
    """An evaluation, as the console and the writers take it."""

    @property
    def iteration(self) -> int:
        """Steps done before it."""

    @property
    def kind(self) -> str:
        """The writers' name for its values."""

    def line(self) -> str:
        """The console line."""

    def row(self) -> dict[str, float | None]:
        """The values by name, for writers."""


@dataclass(frozen=True)
class Evaluation:
    """Losses on held-out data after ``iteration`` steps: means over micro batches and ranks, by the
    family's names. ``name`` is that of the data set, "valid" or "test" where there is only one.
    ``no_perplexity`` are those that are no cross entropies; ``loss`` is the minimised number, where
    it is none of them."""

    iteration: int
    losses: Mapping[str, float]
    name: str = "valid"
    test: bool = False
    no_perplexity: frozenset[str] = frozenset()
    loss: float | None = None

    @property
    def kind(self) -> str:
        """The writers' name for these values."""
        kind = "test" if self.test else "validation"
        return kind if self.name in ("valid", "test") else f"{kind} {self.name}"

    def line(self) -> str:
        """The console line, with the key texts of Megatron that people's scripts look for."""
        where = f"iteration {self.iteration}" + (" on test set" if self.test else "")
        where += "" if self.name in ("valid", "test") else f" on {self.name}"
        ppl = self._perplexities()
        values = "".join(
            f"{name} value: {loss:.6E} | "
            + (f"{name} PPL: {ppl[name]:.6E} | " if name in ppl else "")
            for name, loss in self.losses.items()
        )
        return f" validation loss at {where} | {values}".rstrip()

    def row(self) -> dict[str, float | None]:
        """The values by name, for writers; a single loss is ``loss``."""
        ppl = self._perplexities()
        if len(self.losses) == 1:
            ((name, loss),) = self.losses.items()
            return {"loss": loss, **({"perplexity": ppl[name]} if ppl else {})}
        total = {} if self.loss is None else {"loss": self.loss}
        return {**total, **self.losses, **{f"{name} PPL": value for name, value in ppl.items()}}

    def _perplexities(self) -> dict[str, float]:
        with_one = (name for name in self.losses if name not in self.no_perplexity)
        return {name: perplexity(self.losses[name]) for name in with_one}


def perplexity(loss: float) -> float:
    """exp(loss), with a loss of 20 at most, as in Megatron, so that it does not overflow."""
    return math.nan if math.isnan(loss) else math.exp(min(20.0, loss))


class TimeLeft:
    """How long a run still takes: the remaining iterations at the mean speed of the last log
    intervals, evaluations and saves included, without the first interval, which compiles."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lines: deque[tuple[int, float]] = deque(maxlen=_INTERVALS)

    def begin(self, iteration: int) -> None:
        """At the first step of a process, and after the training went back."""
        self._lines.clear()
        self._lines.append((iteration, self._clock()))
        self._first = True

    def seconds(self, iteration: int, train_iters: int) -> float:
        """At a log line."""
        self._lines.append((iteration, self._clock()))
        (earlier, then), (_, now) = self._lines[0], self._lines[-1]
        speed = (now - then) / max(iteration - earlier, 1)
        if self._first:
            self._lines.popleft()
            self._first = False
        return speed * max(train_iters - iteration, 0)


_INTERVALS = 20
"""Whose speed counts."""


class MemoryUse(NamedTuple):
    """Peak memory of one process since its start, in bytes: of tensors on a CUDA device (on CPU the
    resident set), and what torch's allocator reserved on a CUDA device."""

    allocated: int
    reserved: int | None


def memory_use(device: torch.device) -> MemoryUse:
    """Peak memory of this process on ``device``."""
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
    """Collects the numbers of a log interval; the clock of the first one starts at construction.

    Args:
        devices: of the run, one for each rank.
        peak_flops: FLOP/s of one device; None if not known.
        clock: seconds.
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
        """Adds a number of a step; a tensor stays on the device until the interval ends.

        Args:
            value: a scalar, the same on all ranks unless ``over_ranks``; None if not known.
            reduce: over the steps of the interval, for a name that :data:`METRICS` does not list.
            unit: likewise, for the console.
            over_ranks: takes the mean, the sum or the greatest over the ranks as well. Every rank
                must then record the number.
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
        self, step: Step, flops: float, recomputed_flops: float = 0.0, grows: bool = False
    ) -> None:
        """Counts an optimizer step; reads nothing from the device. FLOPs are the model's, and those
        of recomputed activations, with samples that are as long as can be; the length of samples is
        recorded where it ``grows`` over the run."""
        record, result = self.record, step.result
        fed: torch.Tensor | float = step.samples * step.seq_length
        share: torch.Tensor | float = 1.0
        if step.counts is not None:
            # Attention of short samples costs less than their share of the tokens.
            share, fed = step.counts.fed / fed, step.counts.fed
            record("trained_tokens_per_second", step.counts.trained)
        if grows:
            record("seq_length", float(step.seq_length))
        self._steps += 1
        self._losses = tuple(result.losses)
        record("loss", result.loss)
        for name, loss in result.losses.items() if len(result.losses) > 1 else ():
            record(name, loss, "mean")
        record("grad_norm", result.grad_norm)
        record("learning_rate", step.learning_rate)
        record("weight_decay", step.weight_decay)
        record("global_batch_size", step.samples)
        record("loss_scale", result.loss_scale)
        record("skipped_steps", result.skipped)
        record("nan_steps", result.loss)
        record("samples_per_second", step.samples)
        record("tokens_per_second_per_device", fed / self._devices)
        work, every = flops * share / self._devices, (flops + recomputed_flops) * share
        record("tflops_per_device", work / 1e12)
        peak = self._peak_flops
        record("mfu", work / peak if peak else None)
        record("hfu", every / self._devices / peak if peak else None)
        if result.zeros is not None:
            record("num_zeros", result.zeros)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the time spent inside, on an evaluation or a save, out of the interval."""
        start = self._clock()
        try:
            yield
        finally:
            self._started += self._clock() - start

    def finish(
        self, *, iteration: int, consumed_samples: int, consumed_tokens: int
    ) -> IntervalMetrics:
        """Ends the interval, waits for its last step, and starts the next one. Every rank calls
        it."""
        assert self._steps, "an interval without steps"
        read = iter(numbers([value for values in self._recorded.values() for value in values]))
        now = self._clock()
        # A clock too coarse for a tiny step must not divide by zero.
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
    """Return the values with numbers in place of tensors, which are read together, once."""
    tensors = [value.detach().reshape(()) for value in values if torch.is_tensor(value)]
    # float32 and float64 become float64, exactly; so do counts.
    wide = [each if each.dtype == torch.float32 else each.double() for each in tensors]
    read = iter(torch.stack([each.to(wide[0].device) for each in wide]).tolist() if wide else ())
    return [next(read) if torch.is_tensor(value) else value for value in values]


# Dense 16-bit tensor-core rates (bfloat16; float16 on Volta and Turing, which have no bfloat16),
# FLOP/s of one device, from the makers' data sheets, without structured sparsity. The first pattern
# that matches a device's name counts, so variants come before the part that they derive from.
_PEAKS: tuple[tuple[str, float], ...] = (
    (r"GB300", 2500e12),
    (r"B300", 2250e12),
    (r"GB200", 2500e12),
    (r"B200", 2250e12),
    (r"H200 NVL", 835.5e12),
    (r"GH200|H200", 989e12),
    (r"H100 PCIe", 756e12),
    (r"H100 NVL", 835.5e12),
    (r"H100|H800", 989e12),
    (r"H20", 148e12),
    (r"A100|A800", 312e12),
    (r"A40", 149.7e12),
    (r"A30", 165e12),
    (r"A10", 125e12),
    (r"L40S", 362e12),
    (r"L40", 181e12),
    (r"L4", 121e12),
    (r"V100", 125e12),
    (r"T4", 65e12),
    (r"RTX 6000 Ada", 364e12),
    (r"RTX A6000", 154.8e12),
    (r"RTX 4090$", 165.2e12),
    (r"RTX 3090$", 71e12),
    (r"MI355X", 2516.6e12),
    (r"MI325X|MI300X", 1307.4e12),
    # One device is one of the two dies.
    (r"MI250X", 191.5e12),
)


def peak_flops_of(device_name: str) -> float | None:
    """Dense 16-bit FLOP/s of an accelerator by the name that ``torch.cuda.get_device_name`` gives
    it ("NVIDIA H100 80GB HBM3"), None if it is not in the table."""
    for pattern, flops in _PEAKS:
        if re.search(rf"\b(?:{pattern})\b", device_name, re.IGNORECASE):
            return flops
    return None


def peak_flops(device: torch.device) -> float | None:
    """Dense 16-bit FLOP/s of ``device`` from its maker's data sheet; None for CPUs and unknown
    accelerators, for which :func:`measure_matmul_peak` measures a rate."""
    if device.type != "cuda":
        return None
    return peak_flops_of(torch.cuda.get_device_name(device))


def measure_matmul_peak(dtype: torch.dtype, device: torch.device, seconds: float = 0.5) -> float:
    """The highest rate, in FLOP/s, that square matrix products of ``dtype`` reach on ``device`` in
    about ``seconds``. Processes that share a machine and measure together each get their own
    share."""
    deadline = time.perf_counter() + seconds
    best, side = 0.0, 256
    while True:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        # The first product of a size pays for set-up and does not count.
        _seconds_of_matmul(a, b)
        duration = _seconds_of_matmul(a, b)
        best = max(best, 2 * side**3 / duration)
        left = deadline - time.perf_counter()
        if left <= 0:
            return best
        # The next size takes 8 times as long, and runs twice.
        if side < 8192 and 16 * duration < left:
            side *= 2


def _seconds_of_matmul(a: torch.Tensor, b: torch.Tensor) -> float:
    def synchronize() -> None:
        if a.is_cuda:
            torch.cuda.synchronize(a.device)

    synchronize()
    start = time.perf_counter()
    torch.matmul(a, b)
    synchronize()
    return time.perf_counter() - start
