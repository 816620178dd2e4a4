"""The difficulty of each step, and sequence lengths that grow with it.

The formulas are those of DeepSpeed 0.19's ``CurriculumScheduler``; the schedules are described by
Li et al. 2021 (arXiv:2108.06084, section 4).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator
from typing import Any

from megatron.config import ConfigError, ParallelConfig
from megatron.config.kinds.curriculum import DifficultySchedule
from megatron.data.pipeline import SequenceLengths


def difficulty(schedule: DifficultySchedule, step: int) -> int:
    """The difficulty of a step, counted from 1."""
    assert step >= 1, step
    if schedule.kind == "fixed_discrete":
        return schedule.difficulties[bisect.bisect_left(schedule.last_steps, step)]
    share = (float(step) / schedule.steps) ** (1.0 / schedule.root)
    grown = math.floor(share * (schedule.highest - schedule.lowest) + schedule.lowest)
    grown -= grown % schedule.increment
    first = -(-schedule.lowest // schedule.increment) * schedule.increment
    return min(max(grown, first), schedule.highest)


def stages(schedule: DifficultySchedule) -> Iterator[tuple[int, int]]:
    """The steps at which the difficulty changes: (number of the step from 1, difficulty)."""
    step, last = 1, max((schedule.steps, *schedule.last_steps)) + 1
    while True:
        current = difficulty(schedule, step)
        yield step, current
        if current == difficulty(schedule, last):
            return
        later = range(step, last)  # the difficulty never falls: bisect for the next higher one
        step += bisect.bisect_right(later, current, key=lambda s: difficulty(schedule, s))


class GrowingLengths(SequenceLengths):
    """Lengths of a schedule.

    Step i has the length of step i + 1 of DeepSpeed's schedule, which counts from 1. A sample has
    the length of the step that it falls into by the batch sizes of this run.

    Args:
        seq_length: tokens of a whole sample.
        schedule: how the length grows.
        samples: number of samples consumed after a number of steps.
    """

    grows = True

    def __init__(
        self, seq_length: int, schedule: DifficultySchedule, samples: Callable[[int], int]
    ) -> None:
        super().__init__(seq_length)
        changes = list(stages(schedule))
        self._lengths = [length for _, length in changes]
        self._iterations = [step - 1 for step, _ in changes]
        self._samples = [samples(iteration) for iteration in self._iterations]
        self._tokens = [0]
        for stage, consumed in enumerate(self._samples[1:]):
            more = (consumed - self._samples[stage]) * self._lengths[stage]
            self._tokens.append(self._tokens[stage] + more)

    def check(self, parallel: ParallelConfig, schedule_name: str) -> None:
        """Refuses lengths that do not fit the samples or the layout.

        Raises:
            ConfigError: one exceeds ``--seq-length``, or is not divisible by the ranks.
        """
        longest = max(self._lengths)
        if longest > self.seq_length:
            raise ConfigError(
                f"{schedule_name} grows to sequences of {longest} tokens, more than the samples "
                f"have: --seq-length {self.seq_length}"
            )
        ranks = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
        for length in self._lengths:
            if length % ranks:
                raise ConfigError(
                    f"{schedule_name} has sequences of {length} tokens, which --sequence-parallel "
                    f"splits over --tensor-model-parallel-size {ranks}: make difficulty_step and "
                    f"all difficulties multiples of {ranks}"
                )

    def at(self, iteration: int) -> int:
        return self._lengths[bisect.bisect_right(self._iterations, iteration) - 1]

    def tokens(self, consumed_samples: int) -> int:
        stage = bisect.bisect_right(self._samples, consumed_samples) - 1
        more = (consumed_samples - self._samples[stage]) * self._lengths[stage]
        return self._tokens[stage] + more

    def samples(self, tokens: int) -> int:
        stage = max(0, bisect.bisect_left(self._tokens, tokens) - 1)
        missing = tokens - self._tokens[stage]
        return self._samples[stage] + -(-missing // self._lengths[stage])

    def cut(self, batches: Iterator[Any], iteration: int) -> Iterator[Any]:
        length = self.at(iteration)
        if length == self.seq_length:
            return batches
        return (truncated(batch, length) for batch in batches)


def truncated(batch: Any, seq_length: int) -> Any:
    """The first tokens of every sample: equal to the batch of samples of seq_length + 1 tokens.

    Raises:
        ValueError: samples of this type cannot be cut.
    """
    if not hasattr(batch, "shortened"):
        raise ValueError(
            f"a curriculum of sequence lengths cuts samples of GPTs; a {type(batch).__name__} is "
            "made of parts that belong together: remove curriculum_learning or seqlen_truncate"
        )
    return batch.shortened(seq_length)
