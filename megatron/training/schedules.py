"""Learning rate, weight decay and batch size as pure functions of a run's progress.

Progress is in the unit of a schedule: samples, tokens or iterations. The formulas for rates are
from Megatron's ``OptimizerParamScheduler``. A step uses the value for the progress *before* it, so
the first step of a warm-up from 0 leaves the weights unchanged. Unlike in Megatron, skipped steps
count, such as those after an fp16 overflow. The batch size depends on the consumed samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.config.flags import ConfigError

_POWERS = ("inverse-square-root", "power")


@dataclass(frozen=True)
class LearningRateSchedule:
    """Linear warm-up from ``init_lr`` to ``lr``, then ``style`` down to ``min_lr``. Raises
    ConfigError for inconsistent values; the message names the flags.

    Args:
        min_lr: learning rate at and after ``decay`` (``constant`` ignores it).
        decay: progress from the start of the run at which ``min_lr`` is reached.
        wsd_decay: length of the final phase, which ends at ``decay``. ``WSD`` requires it. It is
            optional for ``inverse-square-root`` and ``power``. If it is longer than ``decay -
            warmup``, the rate drops at the end of the warm-up, as in Megatron.
        exponent: for ``power``: exponent of progress relative to ``timescale`` (OLMo's PowerLR).
        timescale: scale of progress in power laws, which is counted from this long before the
            warm-up's end (Zhai et al. 2021, arXiv:2106.04560). None: the warm-up's, as in Megatron.
        unit: suffix of the flags in error messages: ``iters``, ``samples`` or ``tokens``.
        warmup_unit: unit of ``warmup`` if it differs; the decay then begins at ``start``.
    """

    lr: float
    min_lr: float
    init_lr: float
    style: str
    warmup: int
    decay: int
    wsd_decay: int | None = None
    wsd_style: str = "exponential"
    unit: str = "iters"
    warmup_unit: str | None = None
    start: int = 0
    exponent: float = -0.5
    timescale: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.min_lr <= self.lr:
            raise ConfigError(
                f"--min-lr {self.min_lr:g} must be at least 0 and at most --lr {self.lr:g}"
            )
        if not 0 <= self.init_lr <= self.lr:
            raise ConfigError(
                f"--lr-warmup-init {self.init_lr:g} must be at least 0 and at most --lr {self.lr:g}"
            )
        if self.decay <= 0:
            raise ConfigError(f"--lr-decay-{self.unit} {self.decay} must be more than 0")
        warmup, decay = f"--lr-warmup-{self.warmup_unit or self.unit} {self.warmup}", self.decay
        if self.warmup < 0 or (self.warmup_unit is None and self.warmup >= decay):
            raise ConfigError(
                f"{warmup} must be at least 0 and less than "
                f"--lr-decay-{self.unit} {decay} (by default the length of the run)"
            )
        if self._start >= decay:
            raise ConfigError(
                f"{warmup} ends after {self.start} {self.unit}, which must be less than "
                f"--lr-decay-{self.unit} {decay}"
            )
        if self.style == "WSD" or (self.style in _POWERS and self.wsd_decay is not None):
            self._check_wsd()

    def _check_wsd(self) -> None:
        flag = f"--lr-wsd-decay-{self.unit}"
        if self.wsd_decay is None:
            raise ConfigError(f"--lr-decay-style WSD needs {flag}, the length of its last part")
        if not 0 < self.wsd_decay <= self.decay:
            raise ConfigError(
                f"{flag} {self.wsd_decay} must be more than 0 and at most "
                f"--lr-decay-{self.unit} {self.decay}"
            )

    @property
    def _start(self) -> int:
        return self.warmup if self.warmup_unit is None else self.start

    def __call__(self, progress: float, warmup_progress: float | None = None) -> float:
        """Return the learning rate for a step that starts at ``progress`` (at least 0).
        ``warmup_progress`` is the same position in ``warmup_unit``."""
        risen = progress if warmup_progress is None else warmup_progress
        if self.warmup > 0 and risen <= self.warmup:
            return self.init_lr + (self.lr - self.init_lr) * risen / self.warmup
        if self.style == "constant":
            return self.lr
        if progress > self.decay:
            return self.min_lr
        peak = self.lr
        if self.style in _POWERS:
            falls_from = self.decay - (self.wsd_decay or 0)
            peak = self._power(min(progress, falls_from))
            if progress <= falls_from:
                return peak
        return self.min_lr + self._share_left(progress) * (peak - self.min_lr)

    def _power(self, progress: float) -> float:
        """Return the rate as a power of the progress, but at least ``min_lr``."""
        if self.timescale is None:
            scale, done = max(self._start, 1), max(progress, 1)
        else:
            scale, done = self.timescale, progress - self._start + self.timescale
        if self.style == "inverse-square-root":
            rate: float = self.lr * scale**0.5 / done**0.5
        else:
            rate = self.lr * (done / scale) ** self.exponent
        return max(self.min_lr, rate)

    def _share_left(self, progress: float) -> float:
        """Return the remaining fraction of ``lr - min_lr``, which falls from 1 to 0."""
        if self.wsd_decay is not None and self.style in ("WSD", *_POWERS):
            stable_until = self.decay - self.wsd_decay
            if progress <= stable_until:
                return 1.0
            return _fall(self.wsd_style, (progress - stable_until) / self.wsd_decay)
        return _fall(self.style, (progress - self._start) / (self.decay - self._start))


@dataclass(frozen=True)
class WeightDecaySchedule:
    """Weight decay from ``start`` at progress 0 to ``end`` at progress ``length``, in the unit of
    the learning rate schedule. ``constant`` requires ``start == end``. Raises ConfigError for
    inconsistent values; the message names the flags."""

    start: float
    end: float
    style: str = "constant"
    length: int = 1

    def __post_init__(self) -> None:
        if self.start < 0:
            raise ConfigError(f"--start-weight-decay {self.start:g} must be at least 0")
        if self.end < self.start:
            raise ConfigError(
                f"--end-weight-decay {self.end:g} must be at least "
                f"--start-weight-decay {self.start:g}"
            )

    def __call__(self, progress: float) -> float:
        """Return the weight decay for a step that starts at ``progress`` (at least 0)."""
        if self.style == "constant" or progress > self.length:
            return self.end
        risen = progress / self.length
        if self.style == "cosine":
            risen = 0.5 * (math.cos(math.pi * (1 - risen)) + 1.0)
        return self.start + risen * (self.end - self.start)


def _fall(shape: str, ratio: float) -> float:
    """Return the value at ``ratio`` on a curve that falls from 1 at ratio 0 to 0 at ratio 1."""
    if shape == "linear":
        return 1.0 - ratio
    if shape == "cosine":
        return 0.5 * (math.cos(math.pi * ratio) + 1.0)
    if shape == "minus_sqrt":
        return 1.0 - math.sqrt(ratio)
    assert shape == "exponential", shape
    return 2.0 * math.pow(0.5, ratio) - 1.0


@dataclass(frozen=True)
class BatchSizeSchedule:
    """Constant batch size; features provide subclasses with varying batch sizes. Raises ConfigError
    if the batch size is not divisible into micro batches."""

    global_batch_size: int
    micro_batch_size: int
    data_parallel_size: int

    def __post_init__(self) -> None:
        assert self.data_parallel_size > 0, self.data_parallel_size
        if self.micro_batch_size <= 0:
            raise ConfigError(f"--micro-batch-size {self.micro_batch_size} must be more than 0")
        full = self.global_batch_size
        if full <= 0 or full % self.per_round:
            raise ConfigError(
                f"--global-batch-size {full} must be a positive multiple of "
                f"{self.multiple_of(full)}"
            )

    @property
    def per_round(self) -> int:
        """Number of samples in one micro batch on every data-parallel rank."""
        return self.micro_batch_size * self.data_parallel_size

    def multiple_of(self, value: int) -> str:
        """Return the end of an error message: ``value`` must be a multiple of :attr:`per_round`."""
        step = self.per_round
        below = value // step * step
        nearest = [multiple for multiple in (below, below + step) if multiple > 0]
        return (
            f"--micro-batch-size {self.micro_batch_size} x data-parallel size "
            f"{self.data_parallel_size} = {step}; nearest: {either(nearest or [step])}"
        )

    def batch_size(self, consumed_samples: int) -> int:
        """Return the size of the global batch that follows ``consumed_samples`` samples."""
        return self.global_batch_size

    def micro_batches(self, consumed_samples: int) -> int:
        """Return the number of micro batches per data-parallel rank in that global batch."""
        return self.batch_size(consumed_samples) // self.per_round

    def iterations(self, samples: int) -> int:
        """Return the number of whole steps that fit into ``samples``."""
        return samples // self.global_batch_size

    def samples(self, iterations: int) -> int:
        """Return the number of samples consumed after ``iterations`` steps."""
        return iterations * self.global_batch_size


def either(values: list[int]) -> str:
    """Return numbers joined by "or", for an error message."""
    return " or ".join(str(value) for value in values)
