"""Pipeline parallelism: which layers each stage has, and the order of passes on each rank."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest

from megatron.config.layouts import BOTH_WAYS, SCHEDULES, Layout, check_layout


def stage_bounds(
    blocks: Sequence[bool],
    weights: Sequence[int],
    stages: int,
    method: str,
    costs: Sequence[int] | None = None,
    with_next_block: Sequence[bool] | None = None,
) -> list[int]:
    """Return the index of each stage's first layer, followed by the number of layers. Every stage
    gets at least one of the repeated ``blocks``. Another layer stays with the block before it, or
    belongs to the first or last stage. Raises ValueError if the list cannot be divided this way.

    Args:
        weights: number of parameters of each layer.
        method: ``blocks`` (equal numbers of blocks, with the remainder on the middle stages, away
          from embedding and head; if the costs of blocks differ, the cost of the most expensive
          stage is minimised), ``parameters`` (the size of the largest stage is minimised), or
          comma-separated numbers of blocks.
        costs: cost of each layer, for ``blocks``. None if all blocks cost the same.
        with_next_block: whether each layer must be on the same stage as the next block. Blocks
          that are tied in this way count as one. None if no layers are tied.
    """
    places = _first_blocks(blocks, with_next_block)
    if len(places) < stages:
        raise ValueError(f"{len(places)} blocks cannot be cut into {stages} pipeline stages")
    if method == "blocks":
        loads = [block * cost for block, cost in zip(blocks, costs or blocks, strict=True)]
        ends = [*places[1:], len(blocks)]
        alike = len({sum(loads[a:b]) for a, b in zip(places, ends, strict=True)}) == 1
        counts = _even(len(places), stages) if alike else _balanced(places, loads, stages)
    elif method == "parameters":
        counts = _balanced(places, weights, stages)
    else:
        counts = explicit_counts(method)
        if len(counts) != stages or sum(counts) != len(places) or min(counts) < 1:
            raise ValueError(
                f"--pipeline-partition {method} must be {stages} positive numbers of blocks, one "
                f"per stage, with the sum {len(places)}"
            )
    starts = [places[first] for first in accumulate(counts[:-1])]
    if with_next_block is not None:
        starts = [_first_with_block(place, with_next_block) for place in starts]
    return [0, *starts, len(blocks)]


def _first_blocks(blocks: Sequence[bool], with_next_block: Sequence[bool] | None) -> list[int]:
    """Return the indices of the blocks. Of blocks tied to one stage, only the first is included."""
    places, together = [], False
    for place, block in enumerate(blocks):
        if block and not together:
            places.append(place)
        if block:
            together = with_next_block is not None and with_next_block[place]
    return places


def _first_with_block(place: int, with_next_block: Sequence[bool]) -> int:
    while with_next_block[place - 1]:
        place -= 1
    return place


def explicit_counts(method: str) -> list[int]:
    """Parse numbers of blocks such as ``3,4,4,3``. Raises ValueError if the text is malformed."""
    try:
        return [int(count) for count in method.split(",")]
    except ValueError:
        raise ValueError(
            f"--pipeline-partition {method}: expected blocks, parameters, or the number of blocks "
            "of each stage, separated by commas"
        ) from None


def _even(blocks: int, stages: int) -> list[int]:
    each, over = divmod(blocks, stages)
    first = (stages - over) // 2
    return [each + (first <= stage < first + over) for stage in range(stages)]


def _balanced(places: Sequence[int], weights: Sequence[int], stages: int) -> list[int]:
    """Return the numbers of blocks per stage that minimise the weight of the heaviest stage.
    Bisects over the bound on that weight."""
    begins, ends = [0, *places[1:]], [*places[1:], len(weights)]
    loads = [sum(weights[begin:end]) for begin, end in zip(begins, ends, strict=True)]
    low, high = max(loads), sum(loads)
    bound = low + bisect_left(
        range(low, high + 1), True, key=lambda bound: len(_fill(loads, bound)) <= stages
    )
    counts = _fill(loads, bound)
    # If this bound needs fewer stages, split the stages with the most blocks. None becomes heavier.
    while len(counts) < stages:
        fullest = max(range(len(counts)), key=lambda stage: counts[stage])
        half = counts[fullest] // 2
        counts[fullest : fullest + 1] = [counts[fullest] - half, half]
    return counts


def _fill(loads: Sequence[int], bound: int) -> list[int]:
    counts, load = [0], 0
    for weight in loads:
        if load + weight > bound:
            counts.append(0)
            load = 0
        counts[-1] += 1
        load += weight
    return counts


INPUTS, WEIGHTS = "inputs", "weights"
"""Parts of a backward pass: the gradients of inputs, and later those of linear layers' weights, for
which no other stage waits."""


@dataclass(frozen=True)
class Action:
    """Forward or backward pass of one micro batch through one stage. ``part`` is the part of a
    backward pass, or empty for a complete pass."""

    backward: bool
    stage: int
    micro_batch: int
    part: str = ""

    @property
    def result(self) -> Action:
        """Pass that other actions wait for: the complete one, if this is its first part."""
        return replace(self, part="") if self.part == INPUTS else self


@dataclass(frozen=True)
class PipelineSchedule:
    """Order of each rank's actions in one step of a pipeline with ``chunks`` stages per rank. With
    ``forward_only``, for evaluation, any number of micro batches is possible. Raises ValueError if
    the schedule does not exist or does not fit. The message says what would fit."""

    name: str
    ranks: int
    chunks: int
    micro_batches: int
    forward_only: bool = False

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise ValueError(
                f"unknown schedule {self.name!r}; choose one of {', '.join(SCHEDULES)}"
            )
        if self.ranks < 1 or self.micro_batches < 1:
            raise ValueError(
                f"{self.ranks} processes and {self.micro_batches} micro batches per step: there "
                "must be at least one of each"
            )
        counts = () if self.forward_only else (self.micro_batches,)
        check_layout(Layout(
            pipeline=self.ranks, schedule=self.name, chunks=self.chunks, micro_batches=counts
        ))  # fmt: skip

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        assert 0 <= stage < self.stages, (stage, self)
        if self.name in BOTH_WAYS:
            return min(stage, self.stages - 1 - stage)
        return stage % self.ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage in range(self.stages) if self.rank_of(stage) == rank)

    def actions(self, rank: int) -> list[Action]:
        assert 0 <= rank < self.ranks, (rank, self)
        if self.forward_only:
            return self._forwards(rank)
        if self.name in BOTH_WAYS:
            return list(self._dualpipev(rank))
        order = self._alternating(rank)
        return list(_weights_later(order, rank)) if self.name == "zbh1" and rank else order

    def _alternating(self, rank: int) -> list[Action]:
        """Return the warm-up forwards, then alternating passes, then the remaining backwards."""
        p, m = self.ranks, self.micro_batches
        if self.name in ("1f1b", "zbh1"):
            warm_up = p - rank - 1
        elif m == p:
            warm_up = m * self.chunks
        else:
            warm_up = (p - rank - 1) * 2 + (self.chunks - 1) * p
        forwards, backwards = self._forwards(rank), self._backwards(rank)
        order = forwards[:warm_up]
        for forward, backward in zip_longest(forwards[warm_up:], backwards):
            order += [backward] if forward is None else [forward, backward]
        return order

    def _forwards(self, rank: int) -> list[Action]:
        """Return all forwards of a rank, in their order in a pipeline that never waits."""
        forwards = [
            Action(False, stage, micro_batch)
            for stage in self.stages_of(rank)
            for micro_batch in range(self.micro_batches)
        ]
        return sorted(forwards, key=self._tick)

    def _backwards(self, rank: int) -> list[Action]:
        """Return all backwards of a rank, in the order of its forwards with the stages reversed."""
        stages = self.stages_of(rank)
        mirror = dict(zip(stages, reversed(stages), strict=True))
        return [Action(True, mirror[a.stage], a.micro_batch) for a in self._forwards(rank)]

    def _tick(self, forward: Action) -> int:
        """Return the tick at which a forward runs if each takes one tick. It follows the previous
        stage's forward, and never coincides with another forward on the same rank."""
        if self.name in BOTH_WAYS:
            # A rank's two stages are an odd number apart, so each uses every second tick.
            return 2 * forward.micro_batch + forward.stage
        group, place = divmod(forward.micro_batch, self.ranks)
        return group * self.stages + forward.stage + place

    def _dualpipev(self, rank: int) -> Iterator[Action]:
        """Yield DualPipeV's actions, phase by phase. F and B are forward and backward passes, 0 and
        1 the rank's chunks. In the variant that fills idle time (``enable_zb`` in
        https://github.com/deepseek-ai/DualPipe), I and W are the two parts of a backward pass."""
        below = self.ranks - rank - 1
        half, odd = divmod(rank + 1, 2)
        later = self.name == "dualpipev_zb"
        last = ((half, "B1 B0"), (odd, "B1 I0"), (half, "I1 I0"), (below, "W I0"), (rank + 1, "W"))
        phases = (
            (2 * below, "F0"),
            (rank + 1, "F0 F1"),
            (below, "I1 W F1" if later else "B1 F1"),
            (self.micro_batches - 2 * self.ranks + rank + 1, "F0 B1 F1 B0"),
            (below, "B1 F1 B0"),
            *(last if later else ((rank + 1, "B1 B0"), (below, "B0"))),
        )
        stages = self.stages_of(rank)
        done = dict.fromkeys(("F0", "F1", "B0", "B1"), 0)
        left: deque[Action] = deque()
        for times, phase in phases:
            for kind in phase.split() * times:
                if kind == "W":
                    yield left.popleft()
                    continue
                which = kind.replace("I", "B")
                action = Action(which[0] == "B", stages[int(kind[1])], done[which])
                done[which] += 1
                if kind[0] == "I":
                    left.append(replace(action, part=WEIGHTS))
                    action = replace(action, part=INPUTS)
                yield action


def _weights_later(order: Iterable[Action], delay: int) -> Iterator[Action]:
    """Split each backward pass in two. The second part runs ``delay`` backward passes after the
    first part. For 1F1B with the rank as the delay, every rank stores as many activations as rank
    0. This is ZB-H1 (Qi et al. 2024, arXiv:2401.10241, section 2.2.1)."""
    left: deque[Action] = deque()
    for action in order:
        if not action.backward:
            yield action
            continue
        yield replace(action, part=INPUTS)
        left.append(replace(action, part=WEIGHTS))
        if len(left) > delay:
            yield left.popleft()
    yield from left
