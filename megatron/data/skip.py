"""`--skip-samples 5000:6000`: samples that a run passes over, as if they were not there.

A loss that jumps at some samples is often avoided by starting from an earlier checkpoint and
leaving them out (Chowdhery et al. 2022, section 5.1). The order of all other samples stays as it
was. Nothing is built for more samples than before, which would change the order: at its end a run
takes as many samples as were skipped from behind the ones it would have taken, and where the data
has no more, from the start again.

Ranges are numbers of consumed samples as the log shows them, and so each counts in the stream that
the ranges before it have left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from megatron.config import ConfigError
from megatron.data.samples import Piece, SampleDataset, checked_index

Sample = TypeVar("Sample")


def parse_skipped(values: Sequence[str]) -> tuple[range, ...]:
    """Positions in the order of the data that are passed over, in rising order.

    Args:
        values: FIRST:LAST each; the second one counts in the stream without the first, and so on.

    Raises:
        ConfigError: a value is not FIRST:LAST.
    """
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
    """Position in the order of the data of the sample that is read when so many were consumed."""
    at = consumed_samples
    for each in skipped:
        if each.start > at:
            break
        at += len(each)
    return at


class SkippedSamples(Generic[Sample]):
    """A dataset without some of its samples; as long as before.

    Args:
        dataset: all samples.
        skipped: positions in it, in rising order.

    Raises:
        ConfigError: a range lies behind the data, or nothing is left.
    """

    def __init__(self, dataset: SampleDataset[Sample], skipped: tuple[range, ...]) -> None:
        self.dataset, self.skipped = dataset, skipped
        self._kept = len(dataset) - sum(map(len, skipped))
        if skipped and (skipped[-1].stop > len(dataset) or self._kept < 1):
            raise ConfigError(
                f"--skip-samples: sample {skipped[-1].stop - 1} is to be skipped, and the training "
                f"data have {len(dataset)}, of which some must be left"
            )

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int, /) -> Sample:
        return self.dataset[self._position(index)]

    def origin(self, index: int, /) -> Sequence[Piece]:
        """See `SampleDataset.origin`."""
        return self.dataset.origin(self._position(index))

    def _position(self, index: int) -> int:
        return position(self.skipped, checked_index(index, len(self)) % self._kept)


def check_skipped(before: Sequence[str], now: Sequence[str], consumed_samples: int) -> None:
    """Whether a run can be continued with other ranges: without repeating or losing a sample.

    Args:
        before: --skip-samples of the run that consumed `consumed_samples`.
        now: --skip-samples of the run that goes on.

    Raises:
        ConfigError: what was skipped or read before is now read or skipped.
    """
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
    """What is skipped below a position, ranges that touch made one."""
    joined: list[range] = []
    for each in skipped:
        if each.start >= end:
            break
        start, stop = each.start, min(each.stop, end)
        if joined and joined[-1].stop == start:
            start = joined.pop().start
        joined.append(range(start, stop))
    return joined
