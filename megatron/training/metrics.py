"""Metrics of a run: per step, per log interval and per evaluation; and the peak of its devices. An
:class:`IntervalMeter` keeps the losses of steps as tensors on the device and reads them once, when
the interval ends."""

from __future__ import annotations

import dataclasses
import math
import re
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step; tensors are read only at the end of the interval.

    Args:
        loss: the minimised loss: scalar, mean over micro batches and data-parallel ranks; read only
            at the end of the interval.
        grad_norm: global norm before clipping; None where the engine does not compute it.
        skipped: whether the optimizer left the weights unchanged; as a scalar tensor 1.0 if so.
        flops: model FLOPs of the step; None to count them by tokens.
        recomputed_flops: those of recomputed activations, which are not the model's.
        seq_length: tokens of a sample where that changes over the run, else None.
        fed_tokens: that the model reads, where steps differ in it; ``tokens`` and ``flops`` are
            then those of samples that are as long as can be.
        trained_tokens: whose loss counts, where not all do.
        num_zeros, params_norm: of gradients and of weights, where they are logged.
    """

    loss: torch.Tensor
    losses: Mapping[str, torch.Tensor]
    samples: int
    tokens: int
    learning_rate: float
    weight_decay: float
    grad_norm: torch.Tensor | float | None = None
    loss_scale: float = 1.0
    skipped: torch.Tensor | bool = False
    flops: float | None = None
    recomputed_flops: float = 0.0
    seq_length: int | None = None
    fed_tokens: torch.Tensor | None = None
    trained_tokens: torch.Tensor | None = None
    num_zeros: torch.Tensor | None = None
    params_norm: torch.Tensor | None = None


@dataclass(frozen=True)
class MemoryUse:
    """Peak memory of one process since its start, in bytes: of tensors on a CUDA device (on CPU the
    resident set), and what torch's allocator reserved on a CUDA device."""

    allocated: int
    reserved: int | None


@dataclass(frozen=True)
class RankTimes:
    """What ranks needed for a step without waiting for each other, in seconds."""

    slowest: int
    """The rank that needed most."""
    most: float
    median: float
    least: float


@dataclass(frozen=True)
class Spending:
    """What a run has spent over all its starts; None where nothing counts it, or without a price.

    Args:
        energy_joules: of all devices and processors that have counters.
        devices_joules, processors_joules: its parts.
        device_seconds: from the start of the processes, over all devices.
        cost: in the currency of the price of a device.
        cost_left: of the rest of the run at its present speed.
    """

    energy_joules: float | None = None
    devices_joules: float | None = None
    processors_joules: float | None = None
    device_seconds: float | None = None
    cost: float | None = None
    co2_grams: float | None = None
    cost_left: float | None = None

    def fields(self) -> list[str]:
        """Of the console line."""
        found = []
        if self.energy_joules is not None:
            found.append(f"energy (kWh): {self.energy_joules / 3.6e6:.4g}")
        if self.co2_grams is not None:
            found.append(f"CO2 (kg): {self.co2_grams / 1000:.4g}")
        if self.cost is not None:
            found.append(f"cost: {_amount(self.cost)}")
        if self.cost_left is not None:
            found.append(f"cost to finish: {_amount(self.cost_left)}")
        return found


def _amount(money: float) -> str:
    return f"{money:.2f}" if money >= 10 else f"{money:.3g}"


@dataclass(frozen=True)
class IntervalMetrics:
    """The steps between two log lines. Rates and sizes without a note are those of the last step;
    consumed counts are since the start of the run.

    Args:
        train_iters: iterations that data are prepared for; --train-tokens may end a run earlier.
        loss, losses: means over the steps with a finite loss, NaN if no step has one.
        seconds: wall time of the interval without what was :meth:`IntervalMeter.paused`.
        samples_per_second: over all devices.
        mfu: model FLOP/s as a share of the device's peak, 0 to 1; None without a known peak.
        hfu: the same of all FLOP/s, recomputed ones included.
        seq_length: tokens of a sample in the last step; None where that does not change.
        trained_tokens_per_second: over all devices, of tokens whose loss counts; None where all do.
        rank_times: None for a single process, and before the first was measured.
        seconds_left: until the last iteration, at the present speed; None if not known.
        spending: None where nothing is counted.
    """

    iteration: int
    train_iters: int
    consumed_samples: int
    consumed_tokens: int
    steps: int
    loss: float
    losses: Mapping[str, float]
    grad_norm: float | None
    learning_rate: float
    weight_decay: float
    global_batch_size: int
    loss_scale: float
    skipped_steps: int
    nan_steps: int
    seconds: float
    samples_per_second: float
    tokens_per_second_per_device: float
    tflops_per_device: float
    mfu: float | None
    hfu: float | None
    memory: MemoryUse
    seq_length: int | None = None
    trained_tokens_per_second: float | None = None
    rank_times: RankTimes | None = None
    seconds_left: float | None = None
    spending: Spending | None = None
    devices: int = 1
    num_zeros: float | None = None
    params_norm: float | None = None

    def line(self) -> str:
        """The console line, with the key texts of Megatron that people's scripts look for."""
        fields = [
            f"iteration {self.iteration:8d}/{self.train_iters:8d}",
            f"consumed samples: {self.consumed_samples:12d}",
            f"consumed tokens: {self.consumed_tokens:12d}",
            f"elapsed time per iteration (ms): {1000 * self.seconds / self.steps:.1f}",
            f"learning rate: {self.learning_rate:.3E}",
            f"global batch size: {self.global_batch_size:5d}",
            *(f"{name}: {loss:.6E}" for name, loss in self.losses.items()),
            f"loss scale: {self.loss_scale:.1f}",
        ]
        if self.grad_norm is not None:
            fields.append(f"grad norm: {self.grad_norm:.3f}")
        if self.num_zeros is not None:
            fields.append(f"num zeros: {self.num_zeros:.1f}")
        if self.params_norm is not None:
            fields.append(f"params norm: {self.params_norm:.3f}")
        if self.seq_length is not None:
            fields.append(f"curriculum seqlen: {self.seq_length:5d}")
        fields += [
            f"number of skipped iterations: {self.skipped_steps:3d}",
            f"number of nan iterations: {self.nan_steps:3d}",
            f"samples per second: {self.samples_per_second:.3f}",
            f"tokens per second per device: {self.tokens_per_second_per_device:.1f}",
            *self._trained(),
            f"TFLOP/s per device: {self.tflops_per_device:.3f}",
        ]
        if self.mfu is not None:
            fields.append(f"MFU: {100 * self.mfu:.1f}%")
        if self.hfu is not None:
            fields.append(f"HFU: {100 * self.hfu:.1f}%")
        fields.append(f"memory (GiB): {self.memory.allocated / 2**30:.2f}")
        if (ranks := self.rank_times) is not None:
            fields += [
                f"slowest rank: {ranks.slowest}",
                f"own time of ranks (ms): {1000 * ranks.least:.1f} to {1000 * ranks.most:.1f}",
            ]
        if self.seconds_left is not None:
            fields.append(f"time left: {timedelta(seconds=round(self.seconds_left))}")
        if self.spending is not None:
            fields += self.spending.fields()
        return " " + " | ".join(fields) + " |"

    def short_line(self) -> str:
        """The console line for readers: the same names, the losses first, without values that
        hardly change or explain something; :meth:`row` has everything."""
        rate = self.tokens_per_second_per_device * self.devices
        fields = [
            f"iteration {self.iteration:8d}/{self.train_iters:8d}",
            *(f"{name}: {loss:.6E}" for name, loss in self.losses.items()),
            f"learning rate: {self.learning_rate:.3E}",
            f"consumed samples: {self.consumed_samples}",
        ]
        if self.grad_norm is not None:
            fields.append(f"grad norm: {self.grad_norm:.3f}")
        for count, what in ((self.skipped_steps, "skipped"), (self.nan_steps, "nan")):
            fields += [f"number of {what} iterations: {count}"] * bool(count)
        fields += [
            f"elapsed time per iteration (ms): {1000 * self.seconds / self.steps:.1f}",
            f"tokens per second: {rate:,.0f}",
        ]
        if self.mfu is not None:
            fields.append(f"MFU: {100 * self.mfu:.1f}%")
        if self.seconds_left is not None:
            fields.append(f"time left: {timedelta(seconds=round(self.seconds_left))}")
        return " | ".join(fields) + " |"

    def _spent(self) -> dict[str, float | None]:
        spent = {} if self.spending is None else dataclasses.asdict(self.spending)
        left = {"seconds_left": self.seconds_left}
        return {name: value for name, value in (left | spent).items() if value is not None}

    def _trained(self) -> list[str]:
        rate = self.trained_tokens_per_second
        return [] if rate is None else [f"trained tokens per second: {rate:.1f}"]

    def _ranks(self) -> dict[str, float | None]:
        if (ranks := self.rank_times) is None:
            return {}
        return {
            "slowest_rank": ranks.slowest,
            "own_seconds_slowest": ranks.most,
            "own_seconds_median": ranks.median,
            "own_seconds_fastest": ranks.least,
        }

    def row(self) -> dict[str, float | None]:
        """The values by name, for writers."""
        rate = self.trained_tokens_per_second
        trained = {} if rate is None else {"trained_tokens_per_second": rate}
        growing = {} if self.seq_length is None else {"seq_length": float(self.seq_length)}
        counted = {"num_zeros": self.num_zeros, "params_norm": self.params_norm}
        several = self.losses if len(self.losses) > 1 else {}
        return (
            growing
            | trained
            | self._ranks()
            | {
                "loss": self.loss,
                **several,
                "grad_norm": self.grad_norm,
                "learning_rate": self.learning_rate,
                "weight_decay": self.weight_decay,
                "global_batch_size": self.global_batch_size,
                "loss_scale": self.loss_scale,
                "skipped_steps": self.skipped_steps,
                "nan_steps": self.nan_steps,
                "seconds_per_iteration": self.seconds / self.steps,
                "samples_per_second": self.samples_per_second,
                "tokens_per_second_per_device": self.tokens_per_second_per_device,
                "tflops_per_device": self.tflops_per_device,
                "mfu": self.mfu,
                "hfu": self.hfu,
                "memory_allocated_bytes": self.memory.allocated,
                "memory_reserved_bytes": self.memory.reserved,
            }
            | {name: value for name, value in counted.items() if value is not None}
            | self._spent()
        )


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


class IntervalMeter:
    """Adds up the steps of a log interval; the clock of the first one starts at construction. FLOPs
    per token are forward and backward, peak FLOP/s those of one device."""

    def __init__(
        self,
        *,
        train_iters: int,
        flops_per_token: float,
        device: torch.device,
        devices: int,
        peak_flops: float | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._train_iters = train_iters
        self._flops_per_token = flops_per_token
        self._device = device
        self._devices = devices
        self._peak_flops = peak_flops
        self._clock = clock
        self._steps: list[StepMetrics] = []
        self._started = clock()

    def add(self, step: StepMetrics) -> None:
        """Counts a step; reads nothing from the device."""
        self._steps.append(step)

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
        """Ends the interval, waits for its last step, and starts the next one."""
        assert self._steps, "an interval without steps"
        steps, last = self._steps, self._steps[-1]
        losses = numbers([step.loss for step in steps])
        parts = {name: losses for name in last.losses}
        if len(parts) > 1:
            parts = {name: numbers([step.losses[name] for step in steps]) for name in parts}
        skipped = numbers([step.skipped for step in steps])
        grad_norm = None if last.grad_norm is None else float(last.grad_norm)
        now = self._clock()
        # A clock too coarse for a tiny step must not divide by zero.
        seconds = max(now - self._started, 1e-9)
        # Shares of full samples: attention of short ones costs less than their share.
        fed = numbers([s.tokens if s.fed_tokens is None else s.fed_tokens for s in steps])
        tokens_per_second = sum(fed) / seconds / self._devices
        shares = [count / step.tokens for count, step in zip(fed, steps, strict=True)]
        flops = (self._flops(step) * share for step, share in zip(steps, shares, strict=True))
        flops_per_second = sum(flops) / seconds / self._devices
        more = (step.recomputed_flops * share for step, share in zip(steps, shares, strict=True))
        again = sum(more) / seconds / self._devices
        counted = [step.trained_tokens for step in steps if step.trained_tokens is not None]
        trained = math.fsum(numbers(counted)) / seconds if counted else None
        self._steps, self._started = [], now
        return IntervalMetrics(
            iteration=iteration,
            train_iters=self._train_iters,
            consumed_samples=consumed_samples,
            consumed_tokens=consumed_tokens,
            steps=len(steps),
            loss=_mean_of_finite(losses),
            losses={name: _mean_of_finite(values) for name, values in parts.items()},
            grad_norm=grad_norm,
            learning_rate=last.learning_rate,
            weight_decay=last.weight_decay,
            global_batch_size=last.samples,
            loss_scale=last.loss_scale,
            skipped_steps=round(sum(skipped)),
            nan_steps=sum(not math.isfinite(loss) for loss in losses),
            seconds=seconds,
            samples_per_second=sum(step.samples for step in steps) / seconds,
            tokens_per_second_per_device=tokens_per_second,
            tflops_per_device=flops_per_second / 1e12,
            mfu=flops_per_second / self._peak_flops if self._peak_flops else None,
            hfu=(flops_per_second + again) / self._peak_flops if self._peak_flops else None,
            memory=memory_use(self._device),
            seq_length=last.seq_length,
            trained_tokens_per_second=trained,
            devices=self._devices,
            num_zeros=None if last.num_zeros is None else float(last.num_zeros),
            params_norm=None if last.params_norm is None else float(last.params_norm),
        )

    def _flops(self, step: StepMetrics) -> float:
        return step.tokens * self._flops_per_token if step.flops is None else step.flops


def _mean_of_finite(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else math.nan


def numbers(values: Sequence[torch.Tensor | float]) -> list[float]:
    """Return the values as float32 numbers; those on a device are read together, once."""
    tensors = [value.detach().float().reshape(()) for value in values if torch.is_tensor(value)]
    read = iter(torch.stack(tensors).tolist() if tensors else ())
    return [next(read) if torch.is_tensor(value) else float(value) for value in values]


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
