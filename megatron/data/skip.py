"""`--skip-samples 5000:6000`: samples that a run passes over, as if they were not there.

A loss that jumps at some samples is often gone round by starting from an earlier checkpoint and
leaving them out (Chowdhery et al. 2022, section 5.1). The order of all other samples stays as it
was. Nothing is built for more samples than before, which would change the order: at its end a run
takes as many samples as were skipped from behind the ones it would have taken, and where the data
has no more, from the start again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from megatron.config import ConfigError
from megatron.data.samples import Piece, SampleDataset

Sample = TypeVar("Sample")


def parse_skipped(values: Sequence[str]) -> tuple[range, ...]:
    """Ranges of sample numbers in rising order, those that touch made one.

    Raises:
        ConfigError: a value is not FIRST:LAST.
    """
    ranges: list[range] = []
    for value in values:
        first, _, last = value.partition(":")
        if not (first.isdecimal() and last.isdecimal()) or int(first) >= int(last):
            raise ConfigError(
                f"--skip-samples {value} must be FIRST:LAST, numbers of samples with FIRST < LAST; "
                "LAST itself is not skipped"
            )
        ranges.append(range(int(first), int(last)))
    joined: list[range] = []
    for each in sorted(ranges, key=lambda r: r.start):
        if joined and each.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, each.stop))
        else:
            joined.append(each)
    return tuple(joined)


def position(skipped: Sequence[range], consumed_samples: int) -> int:
    """Number of the sample that is read when `consumed_samples` were."""
    at = consumed_samples
    for each in skipped:
        if each.start > at:
            break
        at += len(each)
    return at


@dataclass(frozen=True)
class SkippedSamples(Generic[Sample]):
    """A dataset without some of its samples; as long as before."""

    dataset: SampleDataset[Sample]
    skipped: tuple[range, ...]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int, /) -> Sample:
        return self.dataset[self._position(index)]

    def origin(self, index: int, /) -> Sequence[Piece]:
        """See `SampleDataset.origin`."""
        return self.dataset.origin(self._position(index))

    def _position(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a dataset of {len(self)} samples")
        return position(self.skipped, index) % len(self.dataset)


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
        shown = " ".join(f"{r.start}:{r.stop}" for r in _below(old, reached)) or "none"
        raise ConfigError(
            f"--skip-samples {' '.join(now) or '(not given)'}: the checkpoint's run has read up to "
            f"sample {reached} and skipped {shown} before that; name these and no others below "
            f"{reached}, so that no sample is repeated or lost"
        )


def _below(skipped: Sequence[range], end: int) -> list[range]:
    return [range(r.start, min(r.stop, end)) for r in skipped if r.start < end]
