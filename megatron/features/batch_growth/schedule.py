"""Schedule of a growing batch size, Megatron's ``--rampup-batch-size``. Steps are converted to
samples and back by iterating over the few batch sizes instead of over all steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.flags import ConfigError
from megatron.training.schedules import BatchSizeSchedule, either


@dataclass(frozen=True)
class RampUp(BatchSizeSchedule):
    """Batch size that ramps up from START to ``global_batch_size``. SAMPLES is divided into equal
    parts, one for each increment. After each part the batch size grows by INCREMENT. The last batch
    of a part is not shortened. Raises ConfigError if a batch size does not divide into micro
    batches, or if the increments do not lead from START to ``global_batch_size``.

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
            # START alone would be a constant batch size, not a ramp-up.
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
        # Floating point, as in Megatron: exact arithmetic moves some steps by one sample.
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
        """Yield (batch size, number of such batches) for all sizes below the final one."""
        consumed = 0
        while (size := self.batch_size(consumed)) < self.global_batch_size:
            batches = math.ceil((self._first_sample_after(size) - consumed) / size)
            yield size, batches
            consumed += batches * size

    def _first_sample_after(self, size: int) -> int:
        """Return the smallest number of consumed samples at which the batch size exceeds
        ``size``."""
        start, increment, samples = self.rampup
        increments = (self.global_batch_size - start) // increment
        part = (size - start) // increment
        sample = math.floor((part + 1) * (samples / increments)) - 1
        while self.batch_size(sample) <= size:
            sample += 1
        return sample
