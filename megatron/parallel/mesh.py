"""The mesh of processes, its axes and its process groups."""

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
"""The axes of the mesh, slowest first, in the order of DeepSpeed's pipeline grid (pipe, data,
model): neighbours in global rank differ along the last."""

REPLICAS = ("data", "context", "expert")
"""The axes along which dense layers are replicated; together they are DeepSpeed's data parallel."""

SAMPLES = ("data", "expert")
"""The axes along which ranks read different samples."""

MODEL = ("pipeline", "tensor")
"""The axes over which dense layers are divided."""

SHARDED = ("pipeline", "expert", "tensor")
"""The axes along which ranks can have different parameters."""

Coordinates = Mapping[str, tuple[int, int]]
"""A rank's position: (rank, size) along each axis; a missing axis is (0, 1)."""

ALONE: Coordinates = {}
"""The coordinates of a single process."""


class Replicated(Protocol):
    """Has the axes along which a parameter is replicated, as a ``Shard`` does."""

    @property
    def reduced(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Group:
    """One rank's view of a process group."""

    ranks: tuple[int, ...] = (0,)
    """Global ranks of the members, in order."""
    rank: int = 0
    """This process's index among them."""
    handle: dist.ProcessGroup | None = None
    """torch's group; None for a single process without torch.distributed."""
    name: str = field(init=False, default="")
    """Its name to torch's compiler, in whose graphs a group is a string."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", getattr(self.handle, "group_name", ""))

    @property
    def size(self) -> int:
        return len(self.ranks)

    def gathered(self, value: Any) -> list[Any]:
        """Return the value of every member, in order. Every member must call it."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.handle)
        return values

    def shared(self, value: Any, source: int = 0) -> Any:
        """Return the value of one member, on all of them. Every member must call it."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, self.ranks[source], group=self.handle)
        return values[0]


SINGLE = Group()
"""The group of a single process."""


@dataclass(frozen=True)
class Mesh:
    """One rank's view of the mesh; by default that of a single process. ``sizes`` are the ranks
    along each axis, 1 for a missing one; ``groups`` the groups that were created, by their axes
    with more than one rank."""

    world: Group = SINGLE
    sizes: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[tuple[str, ...], Group] = field(default_factory=dict)
    handles: Mapping[tuple[int, ...], Any] = field(default_factory=dict)
    """torch's groups by their ranks, those of other ranks too; the same keys on every rank."""
    transfers: Group = SINGLE
    """The ranks of the pipeline, for what stages send each other."""

    @cached_property
    def coordinates(self) -> Coordinates:
        return coordinates_of(self.world.rank, self.sizes)

    def group(self, *axes: str) -> Group:
        """The ranks whose coordinates differ from this one's along these axes only."""
        wide = _wide(axes, self.sizes)
        if not wide and wide not in self.groups:
            return Group((self.world.rank,))
        assert wide in self.groups, f"no group was created along {axes}: add it to _COMBINATIONS"
        return self.groups[wide]

    @cached_property
    def tensor(self) -> Group:
        """The ranks over which this one's layers are cut."""
        return self.group("tensor")

    @cached_property
    def pipeline(self) -> Group:
        return self.group("pipeline")

    @cached_property
    def samples(self) -> Group:
        """The ranks that read different samples for the same layers: data x expert. A mean over
        samples is one over these."""
        return self.group(*SAMPLES)

    @cached_property
    def dense(self) -> Group:
        """All replicas of this rank's dense layers, over whose number gradients are averaged: data
        x context x expert, DeepSpeed's data parallel."""
        return self.group(*REPLICAS)

    def replicas(self, shard: Replicated) -> Group:
        """The ranks with the same share of a parameter as this one, over which its gradient is
        summed and ZeRO partitions it."""
        return self.group(*shard.reduced)

    @cached_property
    def model(self) -> Group:
        """The ranks of one replica of the model: pipeline x tensor."""
        return self.group(*MODEL)


_ALWAYS = (("tensor",), REPLICAS, ("data", "context"), ("pipeline",), MODEL)
"""Combinations of axes whose groups are created at any size: DeepSpeed needs their handles."""

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
    """Global ranks of every group along these axes, groups in the order of their first ranks."""
    others = [axis for axis in AXES if axis not in axes]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(sizes.values())):
        places = coordinates_of(rank, sizes)
        groups.setdefault(tuple(places[axis][0] for axis in others), []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def build_mesh(sizes: Mapping[str, int], timeout: timedelta | None = None) -> Mesh:
    """Creates the groups on every rank; torch.distributed must be initialised. ``sizes`` are the
    ranks along each axis but ``data``, which gets the rest of the world. Groups of the same ranks
    share one group of torch: each costs connections and threads (gloo), or memory on the device
    (NCCL). Only what stages send each other never waits for a collective of all ranks: on GPUs all
    that a group sends is on one stream."""
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
        # Every rank must take part in creating every group, in the same order.
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
    """True if ``flag`` is true on any rank of a group (None for all); every rank must call it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return flag
    flags = torch.tensor(float(flag), dtype=torch.float64, device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return bool(flags > 0)


def first_reason(
    reason: str | None, device: torch.device, group: dist.ProcessGroup | None = None
) -> str | None:
    """The reason of the first rank that has one, None without; every rank must call it."""
    if not any_rank(reason is not None, device, group):
        return None
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return reason
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason, group=group)
    return next(f"rank {rank}: {said}" for rank, said in enumerate(reasons) if said is not None)
