"""The length of a run's sequences, and the tokens that its samples come to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class SequenceLengths:
    """Tokens of a sample at each step, and of all samples up to a number of them: always the same.

    Attributes:
        grows: whether the length is another in some steps.
    """

    grows = False

    def __init__(self, seq_length: int) -> None:
        self.seq_length = seq_length

    def at(self, iteration: int) -> int:
        """Tokens of a sample in the step after ``iteration`` steps."""
        return self.seq_length

    def tokens(self, consumed_samples: int) -> int:
        """Tokens of the first samples of the run."""
        return consumed_samples * self.seq_length

    def samples(self, tokens: int) -> int:
        """The fewest samples that come to so many tokens."""
        return -(-tokens // self.seq_length)

    def cut(self, batches: Iterator[Any], iteration: int) -> Iterator[Any]:
        """Batches as long as they are in the step after ``iteration`` steps."""
        return batches
