"""Number of consumed tokens in a run whose layers drop tokens."""

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
    """Sequence lengths of a run whose layers drop tokens. As in Megatron-DeepSpeed, the mean
    over the layers counts as consumed. ``samples`` returns the samples consumed after a number
    of steps."""

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
        """Return the tokens per sample that a layer keeps after ``iteration`` completed steps."""
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
    """Return the number of tokens computed after ``steps`` steps, summed over all layers. As in
    DeepSpeed, layers without dropping count ``max_value`` per sample, whatever its length."""
    starts, kept = zip(*dropping.changes(), strict=True)
    consumed = [samples(min(start, steps)) for start in (*starts, steps)]
    count, others = len(dropping.layers), dropping.total - len(dropping.layers)
    return sum(
        (end - start) * (each * count + dropping.highest * others)
        for (start, end), each in zip(pairwise(consumed), kept, strict=True)
    )


class Dropping(DataKind):
    """Data kind that counts the consumed tokens of runs whose layers drop tokens."""

    def lengths(
        self, config: RunConfig, lengths: SequenceLengths, samples: Callable[[int], int]
    ) -> SequenceLengths:
        dropping = dropping_of(config)
        return lengths if dropping is None else DroppedLengths(lengths, dropping, samples)


KIND = Dropping()
