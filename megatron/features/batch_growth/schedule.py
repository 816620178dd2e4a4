"""Batches that grow: Megatron's ``--rampup-batch-size``. Steps and samples convert into each other
by iterating over the batch sizes, not over the steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.flags import ConfigError
from megatron.training.schedules import BatchSizeSchedule, either


@dataclass(frozen=True)
class RampUp(BatchSizeSchedule):
    """A ramp-up begins with batches of START samples. Its SAMPLES are cut into equal parts, one for
    each increment up to ``global_batch_size``; after every part the batch grows by INCREMENT.
    A batch is never cut short at the end of a part. Raises ConfigError if a batch size does not
    divide into micro batches, or the increments do not lead from START to ``global_batch_size``.

    Attributes:
        rampup: START, INCREMENT and SAMPLES.
    """

    rampup: tuple[int, int, int]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_rampup(*self.rampup)

    def _check_rampup(self, start: int, increment: int, samples: int) -> None:
        flag = f"--rampup-batch-size {start} {increment} {samples}"
        if start <= 0 or increment <= 0 or samples < 0:
            raise ConfigError(
                f"{flag}: START and INCREMENT must be more than 0 and SAMPLES at least 0"
            )
        if start > self.global_batch_size:
            raise ConfigError(
                f"{flag}: START {start} must be at most "
                f"--global-batch-size {self.global_batch_size}"
            )
        growth = self.global_batch_size - start
        for name, value in (("START", start), ("INCREMENT", increment)):
            needed = name == "START" or growth not in (0, increment)
            if needed and value % self.per_round:
                raise ConfigError(
                    f"{flag}: {name} {value} must be a multiple of {self.multiple_of(value)}"
                )
        if growth % increment:
            reached = start + growth // increment * increment
            # START alone would be a run without a ramp-up, which the flag is not meant for.
            sizes = [size for size in (reached, reached + increment) if size > start]
            fitting = [
                n for n in range(self.per_round, growth + 1, self.per_round) if growth % n == 0
            ]
            below = [n for n in fitting if n < increment][-1:]
            above = [n for n in fitting if n > increment][:1]
            raise ConfigError(
                f"{flag}: steps of {increment} do not lead from {start} to "
                f"--global-batch-size {self.global_batch_size}; nearest batch sizes that they lead "
                f"to: {either(sizes)}; nearest INCREMENT that fits: {either(below + above)}"
            )

    def batch_size(self, consumed_samples: int) -> int:
        start, increment, samples = self.rampup
        increments = (self.global_batch_size - start) // increment
        if increments == 0 or consumed_samples > samples or samples == 0:
            return self.global_batch_size
        # In floating point, like Megatron: exact arithmetic puts some steps one sample elsewhere.
        done = int(consumed_samples / (samples / increments))
        return start + done * increment

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
        start, increment, samples = self.rampup
        increments = (self.global_batch_size - start) // increment
        part = (size - start) // increment
        sample = math.floor((part + 1) * (samples / increments)) - 1
        while self.batch_size(sample) <= size:
            sample += 1
        return sample
