"""Samples that a data-parallel rank reads, as a function of the samples consumed so far.

The order is Megatron's default: a micro step takes the next micro_batch_size * data_size samples,
and rank r reads the r-th group of micro_batch_size. There is no other state, so the whole job's
order does not depend on the number of ranks, on restarts, or on the number of micro steps per step.

`--skip-samples 5000:6000` leaves out samples that caused a loss spike (Chowdhery et al. 2022,
section 5.1). The order of the others does not change, as no larger index is built. The run consumes
as many later samples instead, and wraps around to the first if there are no more. Ranges count
consumed samples as logged: each refers to the order without the ranges before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from megatron.config import ConfigError
from megatron.data.samples import RenumberedSamples, SampleDataset, checked_index

Sample = TypeVar("Sample")


def micro_batch_samples(
    consumed_samples: int, micro_batch_size: int, data_rank: int, data_size: int
) -> range:
    """Return the sample indices of a rank's next micro batch. Raises ValueError on bad input."""
    if consumed_samples < 0 or micro_batch_size < 1 or not 0 <= data_rank < data_size:
        raise ValueError(
            f"no samples for consumed samples {consumed_samples}, micro batch size "
            f"{micro_batch_size}, data rank {data_rank} of {data_size}"
        )
    start = consumed_samples + data_rank * micro_batch_size
    return range(start, start + micro_batch_size)


@dataclass(frozen=True)
class MicroBatchSampler:
    """Micro batches of one rank, starting at `consumed_samples`, while every rank can fill one."""

    total_samples: int
    consumed_samples: int
    micro_batch_size: int
    data_rank: int
    data_size: int

    def __iter__(self) -> Iterator[range]:
        together = self.micro_batch_size * self.data_size
        last_start = self.total_samples - together
        for consumed in range(self.consumed_samples, last_start + 1, together):
            yield micro_batch_samples(
                consumed, self.micro_batch_size, self.data_rank, self.data_size
            )


def parse_skipped(values: Sequence[str]) -> tuple[range, ...]:
    """Return the skipped ranges as ascending positions in the original order. Raises ConfigError if
    a value is not FIRST:LAST."""
    skipped: tuple[range, ...] = ()
    for value in values:
        first, _, last = value.partition(":")
        if not (first.isdecimal() and last.isdecimal()) or int(first) >= int(last):
            raise ConfigError(
                f"--skip-samples {value} must be FIRST:LAST, numbers of samples with FIRST < LAST; "
                "LAST itself is not skipped"
            )
        start, end = position(skipped, int(first)), position(skipped, int(last) - 1) + 1
        outside = [r for r in skipped if r.stop <= start or r.start >= end]
        skipped = tuple(sorted([*outside, range(start, end)], key=lambda r: r.start))
    return skipped


def position(skipped: Sequence[range], consumed_samples: int) -> int:
    """Return the position, in the original order, of the sample after `consumed_samples`."""
    at = consumed_samples
    for each in skipped:
        if each.start > at:
            break
        at += len(each)
    return at


class SkippedSamples(RenumberedSamples[Sample]):
    """Dataset without the samples at positions `skipped`, ascending. Wraps around, so its length
    does not change. Raises ConfigError if a range is beyond the data, or no samples are left."""

    def __init__(self, dataset: SampleDataset[Sample], skipped: tuple[range, ...]) -> None:
        super().__init__(dataset)
        self.skipped = skipped
        self._kept = len(dataset) - sum(map(len, skipped))
        if skipped and (skipped[-1].stop > len(dataset) or self._kept < 1):
            raise ConfigError(
                f"--skip-samples: sample {skipped[-1].stop - 1} is to be skipped, but the training "
                f"data have {len(dataset)} samples, and at least one must be left"
            )

    def number(self, index: int) -> int:
        return position(self.skipped, checked_index(index, len(self)) % self._kept)


def without_samples(
    dataset: SampleDataset[Sample] | None, ranges: Sequence[str]
) -> SampleDataset[Sample] | None:
    """Return ``dataset`` without the samples in ``--skip-samples`` ranges (None if it is None)."""
    skipped = parse_skipped(ranges)
    return SkippedSamples(dataset, skipped) if dataset is not None and skipped else dataset


def continued_ranges(
    flags_before: Sequence[str], before: Sequence[str], flags: Sequence[str]
) -> tuple[str, ...]:
    """Return a resumed run's ranges: all ranges ``before`` and what ``flags`` add to them, or to
    the earlier run's own ``flags_before``; just ``flags`` if they do not begin with either."""
    now = tuple(flags)
    for known in (tuple(before), tuple(flags_before)):
        if now[: len(known)] == known:
            return *before, *now[len(known) :]
    return now


def check_skipped(before: Sequence[str], now: Sequence[str], consumed_samples: int) -> None:
    """Check that a run can continue with the ranges ``now``. Raises ConfigError if a sample that
    was skipped would be read, or one that was read would be skipped."""
    old, new = parse_skipped(before), parse_skipped(now)
    reached = position(old, consumed_samples - 1) + 1 if consumed_samples else 0
    if _below(old, reached) != _below(new, reached):
        raise ConfigError(
            f"--skip-samples {' '.join(now) or '(not given)'}: the checkpoint's run has consumed "
            f"{consumed_samples} samples with --skip-samples {' '.join(before) or '(not given)'}; "
            f"keep that and add ranges from {consumed_samples} on, so that no sample is repeated "
            "or lost"
        )


def _below(skipped: Sequence[range], end: int) -> list[range]:
    """Return the parts of the ranges below position ``end``, with adjacent ones joined."""
    joined: list[range] = []
    for each in skipped:
        if each.start >= end:
            break
        start, stop = each.start, min(each.stop, end)
        if joined and joined[-1].stop == start:
            start = joined.pop().start
        joined.append(range(start, stop))
    return joined
