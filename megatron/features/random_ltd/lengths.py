"""The lengths of a run whose layers drop tokens: the number of consumed tokens."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from itertools import pairwise

from megatron.config import RunConfig
from megatron.data.pipeline import DataKind
from megatron.data.samples import SequenceLengths
from megatron.features.curriculum.lengths import GrowingLengths
from megatron.features.random_ltd.flags import TokenDropping, dropping_of


class DroppedLengths(GrowingLengths):
    """The samples of other lengths. As in Megatron-DeepSpeed the mean over the layers is counted as
    consumed; ``samples`` returns the samples consumed after a number of steps."""

    def __init__(
        self, read: SequenceLengths, dropping: TokenDropping, samples: Callable[[int], int]
    ) -> None:
        self.dropping = dropping
        self._changes, self._kept = zip(*dropping.changes(), strict=True)
        steps = sorted({*self._changes, *(step for step, _ in read.stages)})
        stages = [(step, read.at(step)) for step in steps]
        counted = [dropping.mean_length(length, self.reserved(step)) for step, length in stages]
        super().__init__(read.seq_length, stages, samples, read.folds, counted)
        self.grows = read.grows

    def reserved(self, iteration: int) -> int:
        """Tokens that a layer keeps in the step after ``iteration`` steps."""
        return int(self._kept[bisect.bisect_right(self._changes, iteration) - 1])

    def shown(self, iteration: int) -> dict[str, int]:
        reserved, length = self.reserved(iteration), self.at(iteration)
        return {
            "random_ltd_reserved_length": reserved,
            "actual_seq_length": self.dropping.mean_length(length, reserved),
        }

    def shorter(self, iteration: int) -> tuple[int, int] | None:
        reserved = self.reserved(iteration)
        return (len(self.dropping.layers), reserved) if reserved < self.at(iteration) else None


def layer_tokens(dropping: TokenDropping, steps: int, samples: Callable[[int], int]) -> int:
    """Return the tokens that all layers together have computed after this many steps, as DeepSpeed
    counts: layers that drop none have ``max_value``, whatever the samples' length."""
    starts, kept = zip(*dropping.changes(), strict=True)
    consumed = [samples(min(start, steps)) for start in (*starts, steps)]
    count, others = len(dropping.layers), dropping.total - len(dropping.layers)
    return sum(
        (end - start) * (each * count + dropping.highest * others)
        for (start, end), each in zip(pairwise(consumed), kept, strict=True)
    )


class Dropping(DataKind):
    """Counts the tokens of samples that layers read in part."""

    def lengths(
        self, config: RunConfig, lengths: SequenceLengths, samples: Callable[[int], int]
    ) -> SequenceLengths:
        dropping = dropping_of(config)
        return lengths if dropping is None else DroppedLengths(lengths, dropping, samples)


KIND = Dropping()
