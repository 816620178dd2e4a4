"""Mesh of processes: its axes, each rank's coordinates, and the process groups."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist

AXES = ("pipeline", "data", "context", "expert", "tensor")
"""Axes of the mesh, slowest first: consecutive global ranks differ along the last axis. The order
is that of DeepSpeed's pipeline grid (pipe, data, model)."""

REPLICAS = ("data", "context", "expert")
"""Axes along which dense layers are replicated. Their product is DeepSpeed's data-parallel size."""

SAMPLES = ("data", "expert")
"""Axes along which ranks read different samples."""

MODEL = ("pipeline", "tensor")
"""Axes over which a model's dense layers are divided."""

SHARDED = ("pipeline", "expert", "tensor")
"""Axes along which ranks can have different parameters."""

Coordinates = Mapping[str, tuple[int, int]]
"""A rank's coordinates: (rank, size) along each axis. A missing axis means (0, 1)."""

ALONE: Coordinates = {}
"""Coordinates of a single process."""


class Replicated(Protocol):
    """Object that lists the axes along which a parameter is replicated, such as a ``Shard``."""

    @property
    def reduced(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Group:
    """Process group as seen by one of its ranks."""

    ranks: tuple[int, ...] = (0,)
    """Global ranks of the members, in order."""
    rank: int = 0
    """Index of this process in ``ranks``."""
    handle: dist.ProcessGroup | None = None
    """torch's process group. None for a single process without torch.distributed."""
    name: str = field(init=False, default="")
    """Name of the group in graphs of torch's compiler."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", getattr(self.handle, "group_name", ""))

    @property
    def size(self) -> int:
        return len(self.ranks)

    def gathered(self, value: Any) -> list[Any]:
        """All-gather the members' values, in rank order. Collective: every member must call it."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.handle)
        return values

    def shared(self, value: Any, source: int = 0) -> Any:
        """Broadcast the value of the member ``source``. Collective: every member must call it."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, self.ranks[source], group=self.handle)
        return values[0]


SINGLE = Group()
"""The group of a single process."""


@dataclass(frozen=True)
class Mesh:
    """Mesh of processes as seen by one rank, by default a single process. ``sizes`` are the numbers
    of ranks along each axis, 1 for a missing axis. ``groups`` are the process groups, keyed by the
    axes along which they have more than one rank."""

    world: Group = SINGLE
    sizes: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[tuple[str, ...], Group] = field(default_factory=dict)
    handles: Mapping[tuple[int, ...], Any] = field(default_factory=dict)
    """torch's groups by their ranks, including groups without this rank. Same keys on all ranks."""
    transfers: Group = SINGLE
    """This rank's pipeline group, as used for transfers between stages."""

    @cached_property
    def coordinates(self) -> Coordinates:
        return coordinates_of(self.world.rank, self.sizes)

    def group(self, *axes: str) -> Group:
        """Return the ranks whose coordinates differ from this rank's only along these axes."""
        wide = _wide(axes, self.sizes)
        if not wide and wide not in self.groups:
            return Group((self.world.rank,))
        assert wide in self.groups, f"no group was created along {axes}: add it to _COMBINATIONS"
        return self.groups[wide]

    @cached_property
    def tensor(self) -> Group:
        """Ranks over which this rank's layers are sharded (tensor parallelism)."""
        return self.group("tensor")

    @cached_property
    def pipeline(self) -> Group:
        return self.group("pipeline")

    @cached_property
    def samples(self) -> Group:
        """Ranks with the same layers that read different samples: data x expert. Means over samples
        are computed over this group."""
        return self.group(*SAMPLES)

    @cached_property
    def dense(self) -> Group:
        """All replicas of this rank's dense layers: data x context x expert. Gradients are averaged
        over this group, which is DeepSpeed's data-parallel group."""
        return self.group(*REPLICAS)

    def replicas(self, shard: Replicated) -> Group:
        """Return the ranks that have the same share of a parameter as this rank. Its gradient is
        summed over this group, and ZeRO partitions it over this group."""
        return self.group(*shard.reduced)

    @cached_property
    def model(self) -> Group:
        """Ranks of one replica of the model: pipeline x tensor."""
        return self.group(*MODEL)


_ALWAYS = (("tensor",), REPLICAS, ("data", "context"), ("pipeline",), MODEL)
"""Combinations of axes whose groups always exist, even of one rank, as DeepSpeed requires."""

_COMBINATIONS = (*_ALWAYS, SAMPLES, ("context",), ("expert",), ("expert", "tensor"), SHARDED)
"""All combinations of axes along which ranks communicate."""


def coordinates_of(rank: int, sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    places = {}
    for axis in reversed(AXES):
        size = sizes.get(axis, 1)
        rank, place = divmod(rank, size)
        places[axis] = place, size
    assert rank == 0, f"the mesh {sizes} has no such rank"
    return places


def memberships(sizes: Mapping[str, int], axes: Collection[str]) -> list[tuple[int, ...]]:
    """Return the global ranks of every group along these axes, ordered by their first rank."""
    others = [axis for axis in AXES if axis not in axes]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(sizes.values())):
        places = coordinates_of(rank, sizes)
        groups.setdefault(tuple(places[axis][0] for axis in others), []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def build_mesh(sizes: Mapping[str, int], timeout: timedelta | None = None) -> Mesh:
    """Create the process groups. Collective: every rank must call this, with torch.distributed
    initialised. ``sizes`` has the number of ranks along each axis but ``data``, which gets the
    remaining factor of the world size. Groups of the same ranks share one torch group, since each
    costs connections and threads (gloo) or device memory (NCCL). Transfers between stages do not:
    with NCCL, a group's operations share a stream, so they would wait for collectives."""
    world, rank = tuple(range(dist.get_world_size())), dist.get_rank()
    data_size, rest = divmod(len(world), math.prod(sizes.values()))
    assert rest == 0, "the configuration checks divisibility"
    assert "data" not in sizes and set(sizes) <= set(AXES), sizes
    sizes = {**sizes, "data": data_size}
    handles: dict[tuple[int, ...], Any] = {world: dist.group.WORLD}
    groups = {}
    for axes in _COMBINATIONS:
        wide = _wide(axes, sizes)
        if wide in groups or not (wide or axes in _ALWAYS):
            continue
        # Every rank must participate in creating every group, in the same order.
        for ranks in memberships(sizes, wide):
            if ranks not in handles:
                handles[ranks] = dist.new_group(list(ranks), timeout=timeout)
            if rank in ranks:
                groups[wide] = Group(ranks, ranks.index(rank), handles[ranks])
    transfers = groups["pipeline",] if sizes.get("pipeline", 1) > 1 else SINGLE
    if transfers.ranks == world and dist.get_backend() == "nccl":
        handle = dist.new_group(list(world), timeout=timeout)
        transfers = Group(world, transfers.rank, handle)
    return Mesh(Group(world, rank, dist.group.WORLD), sizes, groups, handles, transfers)


def _wide(axes: Collection[str], sizes: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(axis for axis in AXES if axis in axes and sizes.get(axis, 1) > 1)


def any_rank(flag: bool, device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether ``flag`` is true on any rank of a group (None for all ranks). Collective:
    every rank must call this."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return flag
    flags = torch.tensor(float(flag), dtype=torch.float64, device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return bool(flags > 0)


def first_reason(
    reason: str | None, device: torch.device, group: dist.ProcessGroup | None = None
) -> str | None:
    """Return the reason, with the rank, of the first rank that has one, or None. Collective."""
    if not any_rank(reason is not None, device, group):
        return None
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return reason
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason, group=group)
    return next(f"rank {rank}: {said}" for rank, said in enumerate(reasons) if said is not None)
