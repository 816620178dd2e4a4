"""Which of the ranks that have copies of a tensor have a wrong one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

OTHERS_DIFFER, OWN_DIFFERS = 1, 2
"""Marks of a rank's copy of the model's weights: they are not the main weights of all ranks,
rounded; or not the main weights in the part that this rank updates itself."""


@dataclass(frozen=True)
class Holder:
    """A rank with a copy: the copy's checksum, and what the main weights say of it."""

    rank: int
    host: str
    value: int
    mark: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"


@dataclass(frozen=True)
class ReplicaVerdict:
    """Who has a wrong copy.

    Attributes:
        wrong: in the order of ranks.
        right: those that it differs from; nobody if a rank's main weights differ from the weights
            that it shares with all others.
        sure: whether it is known that these are the wrong ones: of two copies nobody knows.
    """

    wrong: tuple[Holder, ...]
    right: tuple[Holder, ...]
    sure: bool = True

    @classmethod
    def of(cls, holders: Sequence[Holder], partitioned: bool) -> ReplicaVerdict:
        """By the main weights, where there are any, else by the majority. ``partitioned``: ranks
        have parts of the weights, whose checksums were added up, so that a rank's mark is that of
        all (ZeRO 3)."""
        values = [holder.value for holder in holders]
        marked = [holder for holder in holders if holder.mark]
        if marked:
            own = tuple(h for h in marked if h.mark & OWN_DIFFERS) or tuple(marked)
            if len(set(values)) == 1 or partitioned:
                return cls(own, ())
            if len(marked) < len(holders):
                right = [h for h in holders if not h.mark and h.value != marked[0].value]
                return cls(tuple(marked), tuple(right)) if right else cls(own, ())
        classes = sorted(set(values), key=lambda value: (-values.count(value), values.index(value)))
        right = [holder for holder in holders if holder.value == classes[0]]
        wrong = [holder for holder in holders if holder.value != classes[0]]
        return cls(tuple(wrong), tuple(right), 2 * len(right) > len(holders))

    @property
    def of_main(self) -> bool:
        """Whether a rank differs from itself."""
        return not self.right

    def among(self, ranks: Collection[int]) -> ReplicaVerdict:
        """The same about these ranks, where some of them are wrong."""
        wrong = tuple(holder for holder in self.wrong if holder.rank in ranks)
        right = tuple(holder for holder in self.right if holder.rank in ranks)
        return replace(self, wrong=wrong or self.wrong, right=right or self.right)

    def words(self, how: str) -> str:
        """Who differs from whom; ``how`` says in what."""
        wrong, right = joined(self.wrong), joined(self.right)
        verb = "differs" if len(self.wrong) == 1 else "differ"
        how = f" {how}" if how else ""
        if self.of_main:
            return f"on {wrong} the model's weights are not its main weights{how}"
        unsure = "" if self.sure else "; no majority has one of them, so either may be wrong"
        return f"{wrong} {verb} from {right}{how}{unsure}"


def joined(holders: Sequence[Holder]) -> str:
    """The ranks in words, with their hosts."""
    *first, last = map(str, holders) if holders else [""]
    return f"{', '.join(first)} and {last}" if first else last
