"""The samples that a data-parallel rank reads, as a function of the samples consumed so far.

The order is Megatron's default: a micro step takes the next micro_batch_size * data_size samples,
rank r the r-th micro_batch_size of them. There is no other state, so the stream of the whole job
does not depend on the number of ranks, on restarts, or on the number of micro steps in a step.

`--skip-samples 5000:6000` leaves out samples that made the loss spike (Chowdhery et al. 2022,
section 5.1). The order of all others stays, and no larger index is built, which would change it:
the run consumes as many later samples instead, and starts again at the first if there are no more.
Ranges count consumed samples as logged, so each counts in the stream that those before it left.
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
    """Sample numbers of one rank's next micro batch; ValueError for numbers out of range."""
    if consumed_samples < 0 or micro_batch_size < 1 or not 0 <= data_rank < data_size:
        raise ValueError(
            f"no samples for consumed samples {consumed_samples}, micro batch size "
            f"{micro_batch_size}, data rank {data_rank} of {data_size}"
        )
    start = consumed_samples + data_rank * micro_batch_size
    return range(start, start + micro_batch_size)


@dataclass(frozen=True)
class MicroBatchSampler:
    """The micro batches of one rank from `consumed_samples` on, while all ranks have full ones."""

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
    """Positions in the order of the data that are skipped, ascending. Raises ConfigError if a value
    is not FIRST:LAST."""
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
    """Position in the order of the data of the next sample after `consumed_samples`."""
    at = consumed_samples
    for each in skipped:
        if each.start > at:
            break
        at += len(each)
    return at


class SkippedSamples(RenumberedSamples[Sample]):
    """A dataset without the samples at some positions, ascending; its length stays the same. Raises
    ConfigError if a range is beyond the end of the data, or nothing is left."""

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
    """A dataset, if there is one, without the samples of ``--skip-samples`` ranges."""
    skipped = parse_skipped(ranges)
    return SkippedSamples(dataset, skipped) if dataset is not None and skipped else dataset


def continued_ranges(
    flags_before: Sequence[str], before: Sequence[str], flags: Sequence[str]
) -> tuple[str, ...]:
    """The ranges of a run that continues another one, whose flags had some and which then skipped
    more, ``before`` in all: those, and what this run's flags have next to them."""
    now = tuple(flags)
    for known in (tuple(before), tuple(flags_before)):
        if now[: len(known)] == known:
            return *before, *now[len(known) :]
    return now


def check_skipped(before: Sequence[str], now: Sequence[str], consumed_samples: int) -> None:
    """Check that a run can continue with other ranges: ConfigError if a sample skipped before would
    be read, or one read before would be skipped."""
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
    """The ranges below a position, adjacent ones joined."""
    joined: list[range] = []
    for each in skipped:
        if each.start >= end:
            break
        start, stop = each.start, min(each.stop, end)
        if joined and joined[-1].stop == start:
            start = joined.pop().start
        joined.append(range(start, stop))
    return joined
