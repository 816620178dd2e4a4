"""Pipeline schedules: in which order each rank runs the forwards and backwards of its stages.

The layer list is cut into ``ranks * chunks`` stages, numbered in layer order. A rank has
``chunks`` of them, and a step takes every micro batch forward through all stages and back.

- ``1f1b``: one stage per rank. After its warm-up a rank alternates one forward, one backward
  (Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1).
- ``interleaved``: stage s is on rank s % ranks. The same alternation over several chunks, groups
  of ``ranks`` micro batches at a time (section 2.2.2).
- ``dualpipev``: two stages per rank; micro batches go down the ranks and come back up, so that the
  first rank also has the last stage (DeepSeek-AI, https://github.com/deepseek-ai/DualPipe;
  here a backward computes the gradients of inputs and weights together).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from megatron.config.layouts import SCHEDULES, Layout, check_layout


@dataclass(frozen=True)
class Action:
    """The forward or backward of one micro batch through one stage."""

    backward: bool
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class PipelineSchedule:
    """The order of actions on each rank during one step of a pipeline, with ``chunks`` stages per
    rank. With ``forward_only``, for evaluation, any number of micro batches is possible. Raises
    ValueError if the schedule does not exist or does not fit; says why and what would fit."""

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
        if self.name == "dualpipev":
            return min(stage, self.stages - 1 - stage)
        return stage % self.ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage in range(self.stages) if self.rank_of(stage) == rank)

    def actions(self, rank: int) -> list[Action]:
        assert 0 <= rank < self.ranks, (rank, self)
        if self.forward_only:
            return self._forwards(rank)
        if self.name == "dualpipev":
            return list(self._dualpipev(rank))
        return self._alternating(rank)

    def _alternating(self, rank: int) -> list[Action]:
        """Warm-up forwards, then forwards and backwards in turn, then the remaining backwards."""
        p, m = self.ranks, self.micro_batches
        if self.name == "1f1b":
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
        """All forwards of a rank, in the order of a pipeline that never waits."""
        forwards = [
            Action(False, stage, micro_batch)
            for stage in self.stages_of(rank)
            for micro_batch in range(self.micro_batches)
        ]
        return sorted(forwards, key=self._tick)

    def _backwards(self, rank: int) -> list[Action]:
        """The mirror image of the forwards: the last chunk comes first."""
        stages = self.stages_of(rank)
        mirror = dict(zip(stages, reversed(stages), strict=True))
        return [Action(True, mirror[a.stage], a.micro_batch) for a in self._forwards(rank)]

    def _tick(self, forward: Action) -> int:
        """When a forward runs if each takes one tick: after that of the previous stage, and no two
        at once on one rank."""
        if self.name == "dualpipev":
            # A rank's two stages are an odd number apart, so every second tick is free for each.
            return 2 * forward.micro_batch + forward.stage
        group, place = divmod(forward.micro_batch, self.ranks)
        return group * self.stages + forward.stage + place

    def _dualpipev(self, rank: int) -> Iterator[Action]:
        """DualPipeV's seven phases; F and B are forward and backward, 0 and 1 the chunk."""
        below = self.ranks - rank - 1
        phases = (
            (2 * below, "F0"),
            (rank + 1, "F0 F1"),
            (below, "B1 F1"),
            (self.micro_batches - 2 * self.ranks + rank + 1, "F0 B1 F1 B0"),
            (below, "B1 F1 B0"),
            (rank + 1, "B1 B0"),
            (below, "B0"),
        )
        stages = self.stages_of(rank)
        done = dict.fromkeys(("F0", "F1", "B0", "B1"), 0)
        for times, phase in phases:
            for kind in phase.split() * times:
                yield Action(kind[0] == "B", stages[int(kind[1])], done[kind])
                done[kind] += 1
