"""Sequences that grow: lengths by step, tokens by samples, and batches cut to the length."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from typing import Any

from megatron.config import ConfigError, ParallelConfig
from megatron.config.kinds.curriculum import DifficultySchedule
from megatron.data.kinds.curriculum.schedule import stages
from megatron.data.pipeline import SequenceLengths


class GrowingLengths(SequenceLengths):
    """Lengths of a schedule.

    Step i has the length of step i + 1 of DeepSpeed's schedule, whose first step is number 1. A
    sample's length is that of the step which the batch sizes of this run put it in.

    Args:
        seq_length: tokens of a whole sample.
        schedule: how the length grows.
        samples: consumed in so many steps.
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
        """Refuses lengths that a layout cannot work on.

        Raises:
            ConfigError: one is beyond ``--seq-length``, or does not divide over the ranks.
        """
        longest = max(self._lengths)
        if longest > self.seq_length:
            raise ConfigError(
                f"{schedule_name} goes up to sequences of {longest} tokens, more than the samples "
                f"have: --seq-length {self.seq_length}"
            )
        ranks = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
        for length in self._lengths:
            if length % ranks:
                raise ConfigError(
                    f"{schedule_name} comes to sequences of {length} tokens, which "
                    f"--sequence-parallel splits over --tensor-model-parallel-size {ranks}: make "
                    f"difficulty_step and all difficulties multiples of {ranks}"
                )

    def at(self, iteration: int) -> int:
        """See `SequenceLengths.at`."""
        return self._lengths[bisect.bisect_right(self._iterations, iteration) - 1]

    def tokens(self, consumed_samples: int) -> int:
        """See `SequenceLengths.tokens`."""
        stage = bisect.bisect_right(self._samples, consumed_samples) - 1
        return (
            self._tokens[stage] + (consumed_samples - self._samples[stage]) * self._lengths[stage]
        )

    def samples(self, tokens: int) -> int:
        """See `SequenceLengths.samples`."""
        stage = max(0, bisect.bisect_left(self._tokens, tokens) - 1)
        missing = tokens - self._tokens[stage]
        return self._samples[stage] + -(-missing // self._lengths[stage])

    def cut(self, batches: Iterator[Any], iteration: int) -> Iterator[Any]:
        """See `SequenceLengths.cut`; each is cut as it is asked for and none before."""
        length = self.at(iteration)
        if length == self.seq_length:
            return batches
        return (truncated(batch, length) for batch in batches)


def truncated(batch: Any, seq_length: int) -> Any:
    """The first tokens of every sample: equal to the batch of samples of seq_length + 1 tokens.

    Raises:
        ValueError: samples are of another kind, of which more than the end would be lost.
    """
    if not hasattr(batch, "shortened"):
        raise ValueError(
            f"a curriculum of sequence lengths cuts samples of GPTs; a {type(batch).__name__} is "
            "made of parts that belong together: remove curriculum_learning or seqlen_truncate"
        )
    return batch.shortened(seq_length)
