"""The global batch size as a pure function of the samples consumed so far.

Both classes here satisfy :class:`BatchSizeSchedule`; :func:`batch_size_schedule` picks one. Steps
and samples convert into each other by walking over the phases of the ramp, never over the steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from megatron.config.flags import ConfigError


class BatchSizeSchedule(Protocol):
    """Batch sizes over the course of a run that starts at 0 consumed samples."""

    def batch_size(self, consumed_samples: int) -> int:
        """Samples of the global batch that follows after ``consumed_samples``."""
        ...

    def micro_batches(self, consumed_samples: int) -> int:
        """Micro batches of that global batch on each data-parallel rank."""
        ...

    def iterations(self, samples: int) -> int:
        """Steps of a run of ``samples``; a last batch that would exceed them is left out."""
        ...

    def samples(self, iterations: int) -> int:
        """Samples consumed after ``iterations`` steps."""
        ...


@dataclass(frozen=True)
class ConstantBatchSize:
    """The same global batch throughout.

    Raises:
        ConfigError: if ``global_batch_size`` does not divide into micro batches.
    """

    global_batch_size: int
    micro_batch_size: int
    data_parallel_size: int

    def __post_init__(self) -> None:
        _check_layout(self.global_batch_size, self.micro_batch_size, self.data_parallel_size)

    def batch_size(self, consumed_samples: int) -> int:
        return self.global_batch_size

    def micro_batches(self, consumed_samples: int) -> int:
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)

    def iterations(self, samples: int) -> int:
        return samples // self.global_batch_size

    def samples(self, iterations: int) -> int:
        return iterations * self.global_batch_size


@dataclass(frozen=True)
class BatchSizeRampup:
    """A batch that grows in equal steps, Megatron's ``--rampup-batch-size``.

    The batch has ``start`` samples at first. ``ramp_samples`` samples are cut into as many equal
    parts as it takes increments to reach ``global_batch_size``; with every part consumed the batch
    grows by ``increment``. A batch is never cut short at the end of a part.

    Args:
        start: samples of the first batches.
        increment: samples that each step of the ramp adds.
        ramp_samples: samples of the whole ramp.
        global_batch_size: samples of a batch after the ramp.
        micro_batch_size: samples that one rank takes through the model at once.
        data_parallel_size: number of data-parallel ranks.

    Raises:
        ConfigError: if a batch size of the ramp does not divide into micro batches, or the
            increments do not lead from ``start`` to ``global_batch_size``.
    """

    start: int
    increment: int
    ramp_samples: int
    global_batch_size: int
    micro_batch_size: int
    data_parallel_size: int

    def __post_init__(self) -> None:
        _check_layout(self.global_batch_size, self.micro_batch_size, self.data_parallel_size)
        flag = f"--rampup-batch-size {self.start} {self.increment} {self.ramp_samples}"
        if self.start <= 0 or self.increment <= 0 or self.ramp_samples < 0:
            raise ConfigError(
                f"{flag}: START and INCREMENT must be more than 0 and SAMPLES at least 0"
            )
        if self.start > self.global_batch_size:
            raise ConfigError(
                f"{flag}: START {self.start} must be at most "
                f"--global-batch-size {self.global_batch_size}"
            )
        self._check_divisible(flag, "START", self.start)
        growth = self.global_batch_size - self.start
        if growth not in (0, self.increment):
            self._check_divisible(flag, "INCREMENT", self.increment)
        if growth % self.increment:
            reached = self.start + growth // self.increment * self.increment
            # START alone would be a run without a ramp, which nobody means who asks for one.
            sizes = [size for size in (reached, reached + self.increment) if size > self.start]
            raise ConfigError(
                f"{flag}: steps of {self.increment} do not lead from {self.start} to "
                f"--global-batch-size {self.global_batch_size}; nearest batch sizes that they lead "
                f"to: {_either(sizes)}; nearest INCREMENT that would do: "
                f"{_either(self._nearest_increments(growth))}"
            )

    def _check_divisible(self, flag: str, name: str, value: int) -> None:
        step = self.micro_batch_size * self.data_parallel_size
        if value % step:
            raise ConfigError(
                f"{flag}: {name} {value} must be a multiple of --micro-batch-size "
                f"{self.micro_batch_size} x data-parallel size {self.data_parallel_size} = {step}; "
                f"nearest: {_either(_nearest_multiples(value, step))}"
            )

    def _nearest_increments(self, growth: int) -> list[int]:
        step = self.micro_batch_size * self.data_parallel_size
        fitting = [n for n in range(step, growth + 1, step) if growth % n == 0]
        below = [n for n in fitting if n < self.increment][-1:]
        above = [n for n in fitting if n > self.increment][:1]
        return below + above

    def batch_size(self, consumed_samples: int) -> int:
        increments = (self.global_batch_size - self.start) // self.increment
        if increments == 0 or consumed_samples > self.ramp_samples or self.ramp_samples == 0:
            return self.global_batch_size
        # In floating point, like Megatron: exact arithmetic puts some steps one sample elsewhere.
        done = int(consumed_samples / (self.ramp_samples / increments))
        return self.start + done * self.increment

    def micro_batches(self, consumed_samples: int) -> int:
        step = self.micro_batch_size * self.data_parallel_size
        return self.batch_size(consumed_samples) // step

    def iterations(self, samples: int) -> int:
        count = 0
        for size, batches in self._ramp():
            taken = min(samples // size, batches)
            count += taken
            samples -= taken * size
        return count + samples // self.global_batch_size

    def samples(self, iterations: int) -> int:
        consumed = 0
        for size, batches in self._ramp():
            taken = min(iterations, batches)
            consumed += taken * size
            iterations -= taken
        return consumed + iterations * self.global_batch_size

    def _ramp(self) -> Iterator[tuple[int, int]]:
        """(batch size, number of such batches), for the sizes below the final one."""
        consumed = 0
        while (size := self.batch_size(consumed)) < self.global_batch_size:
            batches = math.ceil((self._first_sample_after(size) - consumed) / size)
            yield size, batches
            consumed += batches * size

    def _first_sample_after(self, size: int) -> int:
        """The smallest number of consumed samples at which the batch is larger than ``size``."""
        increments = (self.global_batch_size - self.start) // self.increment
        part = (size - self.start) // self.increment
        sample = math.floor((part + 1) * (self.ramp_samples / increments)) - 1
        while self.batch_size(sample) <= size:
            sample += 1
        return sample


def batch_size_schedule(
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    rampup: tuple[int, int, int] | None = None,
) -> BatchSizeSchedule:
    """The schedule that the flags ask for; ``rampup`` is (START, INCREMENT, SAMPLES).

    Raises:
        ConfigError: see :class:`ConstantBatchSize` and :class:`BatchSizeRampup`.
    """
    if rampup is None:
        return ConstantBatchSize(global_batch_size, micro_batch_size, data_parallel_size)
    return BatchSizeRampup(*rampup, global_batch_size, micro_batch_size, data_parallel_size)


def _check_layout(global_batch_size: int, micro_batch_size: int, data_parallel_size: int) -> None:
    assert data_parallel_size > 0, data_parallel_size
    if micro_batch_size <= 0:
        raise ConfigError(f"--micro-batch-size {micro_batch_size} must be more than 0")
    step = micro_batch_size * data_parallel_size
    if global_batch_size <= 0 or global_batch_size % step:
        raise ConfigError(
            f"--global-batch-size {global_batch_size} must be a positive multiple of "
            f"--micro-batch-size {micro_batch_size} x data-parallel size {data_parallel_size} = "
            f"{step}; nearest: {_either(_nearest_multiples(global_batch_size, step))}"
        )


def _nearest_multiples(value: int, step: int) -> list[int]:
    below = value // step * step
    return [multiple for multiple in (below, below + step) if multiple > 0] or [step]


def _either(values: list[int]) -> str:
    return " or ".join(str(value) for value in values)
