"""What the results of computing one step several times mean: faulty hardware, bad data, or a
training that diverges. No tensors, and no communication."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low

TOLERANCE = 1e-3
"""Relative difference of two computations of one number: kernels of GPUs add up in orders that
differ. What makes a step an anomaly is far larger."""

FAR, NEAR, TIMES = 0.5, 0.15, 6.0
"""How far the logarithm of a micro batch's loss must be from that of the usual loss to stand out:
more than :data:`NEAR`, and than :data:`TIMES` as far as most of its step. Where most of the step
are farther than :data:`FAR`, so are all that are."""


@dataclass(frozen=True)
class Computed:
    """What one rank computed of the micro batches of one data-parallel rank.

    Attributes:
        place: its pipeline stage and tensor-parallel rank.
        of: the data-parallel rank whose micro batches they are.
        losses: of each of them; empty on stages that compute none.
        squares: sum of the squares of its gradients, before they are averaged over ranks.
    """

    rank: int
    host: str
    place: tuple[int, int]
    of: int
    losses: tuple[float, ...]
    squares: float

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"

    def equals(self, other: Computed) -> bool:
        """Whether the numbers are the same, but for the order of sums."""
        mine, its = (*self.losses, self.squares), (*other.losses, other.squares)
        return len(mine) == len(its) and all(map(_close, mine, its))

    def oddness(self, usual: float) -> float:
        """How far its losses are from what is usual, as a logarithm."""
        return max((_off(loss, usual) for loss in self.losses), default=0.0)


def _close(a: float, b: float) -> bool:
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.isnan(a) == math.isnan(b) and (math.isnan(a) or a == b)
    return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=1e-12)


def _off(loss: float, usual: float) -> float:
    if not math.isfinite(loss) or loss <= 0 or usual <= 0:
        return 0.0 if loss == usual else math.inf
    # Where a model knows its data by heart, noise of this size means nothing.
    return abs(math.log((loss + 0.01) / (usual + 0.01)))


def changed(first: Sequence[Computed], again: Sequence[Computed]) -> list[Computed]:
    """The ranks whose second result of the same step is another one."""
    return [a for a, b in zip(first, again, strict=True) if not a.equals(b)]


def wrong_ranks(
    own: Sequence[Computed], exchanged: Sequence[Computed], usual: float
) -> list[Computed]:
    """The ranks that compute micro batches otherwise than other data-parallel ranks do: their own
    as well as those of the next. Of two ranks that differ, the one whose losses are farther from
    what is ``usual`` is wrong; both where neither is."""
    by = {(each.place, each.of): each for each in own}
    suspects: dict[int, int] = {}
    pairs = [(by[each.place, each.of], each) for each in exchanged]
    for mine, other in pairs:
        if not mine.equals(other):
            for each in (mine, other):
                suspects[each.rank] = suspects.get(each.rank, 0) + 1
    if not suspects:
        return []
    most = max(suspects.values())
    found = [each for each in own if suspects.get(each.rank) == most]
    if len(found) > 1:
        odd = {each.rank: 0.0 for each in found}
        for each in (*own, *exchanged):
            if each.rank in odd:
                odd[each.rank] += min(each.oddness(usual), 1e3)
        largest = max(odd.values())
        if min(odd.values()) < 0.9 * largest:
            found = [each for each in found if odd[each.rank] > 0.9 * largest]
    return found


@dataclass(frozen=True)
class OddBatches:
    """The micro batches, as (data-parallel rank, number), whose losses stand out in a step, and the
    median of all."""

    batches: tuple[tuple[int, int], ...]
    total: int
    usual: float

    @property
    def few(self) -> bool:
        """Whether they are a minority, so that the data is to blame."""
        return 0 < 2 * len(self.batches) < self.total


def odd_batches(computed: Sequence[Computed], usual: float | None) -> OddBatches:
    """Those whose loss is far from what is usual: the losses of the steps before, or the median of
    this step's."""
    losses: Mapping[tuple[int, int], float] = {
        (each.of, number): loss for each in computed for number, loss in enumerate(each.losses)
    }
    finite = [loss for loss in losses.values() if math.isfinite(loss)]
    middle = usual if usual is not None else median(finite) if finite else 0.0
    offs = {place: _off(loss, middle) for place, loss in losses.items()}
    typical = median_low(offs.values()) if offs else 0.0
    limit = FAR if typical > FAR else max(NEAR, TIMES * typical)
    found = [place for place, off in offs.items() if off > limit]
    return OddBatches(tuple(sorted(found)), len(losses), middle)
