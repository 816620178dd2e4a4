"""The length of a run's sequences, and the tokens that its samples come to."""

from __future__ import annotations

import bisect

from megatron.config import ConfigError, ParallelConfig
from megatron.config.curriculum import DifficultySchedule
from megatron.data.curriculum.schedule import stages
from megatron.training.batch_size import BatchSizeSchedule


class SequenceLengths:
    """Tokens of a sample at each step, and of all samples up to a number of them.

    Step i has the length of step i + 1 of DeepSpeed's schedule, whose first step is number 1. A
    sample's length is that of the step which the batch sizes of this run put it in.

    Args:
        seq_length: tokens of a whole sample.
        schedule: how the length grows; None if it does not.
        batch_size: global batch size by consumed samples.
    """

    def __init__(
        self, seq_length: int, schedule: DifficultySchedule | None, batch_size: BatchSizeSchedule
    ) -> None:
        changes = [(1, seq_length)] if schedule is None else list(stages(schedule))
        self.grows = schedule is not None
        self._lengths = [length for _, length in changes]
        self._iterations = [step - 1 for step, _ in changes]
        self._samples = [batch_size.samples(iteration) for iteration in self._iterations]
        self._tokens = [0]
        for stage, samples in enumerate(self._samples[1:]):
            more = (samples - self._samples[stage]) * self._lengths[stage]
            self._tokens.append(self._tokens[stage] + more)

    def check(self, seq_length: int, parallel: ParallelConfig, schedule_name: str) -> None:
        """Refuses lengths that a layout cannot work on.

        Raises:
            ConfigError: one is beyond ``--seq-length``, or does not divide over the ranks.
        """
        longest = max(self._lengths)
        if longest > seq_length:
            raise ConfigError(
                f"{schedule_name} goes up to sequences of {longest} tokens, more than the samples "
                f"have: --seq-length {seq_length}"
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
        """Tokens of a sample in the step after ``iteration`` steps."""
        return self._lengths[bisect.bisect_right(self._iterations, iteration) - 1]

    def tokens(self, consumed_samples: int) -> int:
        """Tokens of the first samples of the run."""
        stage = bisect.bisect_right(self._samples, consumed_samples) - 1
        return (
            self._tokens[stage] + (consumed_samples - self._samples[stage]) * self._lengths[stage]
        )

    def samples(self, tokens: int) -> int:
        """The fewest samples that come to so many tokens."""
        stage = max(0, bisect.bisect_left(self._tokens, tokens) - 1)
        missing = tokens - self._tokens[stage]
        return self._samples[stage] + -(-missing // self._lengths[stage])
