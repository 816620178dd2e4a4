"""Process groups: which ranks work on what together."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist


@dataclass(frozen=True)
class Group:
    """One rank's view of a process group.

    Attributes:
        ranks: global ranks of the members, in order.
        rank: this process's place among them.
        handle: torch's group; None for a lone process without torch.distributed.
    """

    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    handle: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)


SINGLE = Group()
"""The group of a process that works alone."""


@dataclass(frozen=True)
class Mesh:
    """The groups of one rank in a layout of pipeline x data x tensor ranks.

    Global ranks count tensor ranks fastest, then data, then pipeline ranks; DeepSpeed's pipeline
    grid (axes pipe, data, model) has the same order.
    """

    world: Group = SINGLE
    tensor: Group = SINGLE
    data: Group = SINGLE
    pipeline: Group = SINGLE
    model: Group = SINGLE
    """All ranks that hold one replica of the model: tensor x pipeline."""


def rank_grid(pipeline_size: int, data_size: int, tensor_size: int) -> list[list[list[int]]]:
    """Global ranks by pipeline, data and tensor rank."""
    return [
        [
            [(p * data_size + d) * tensor_size + t for t in range(tensor_size)]
            for d in range(data_size)
        ]
        for p in range(pipeline_size)
    ]


def build_mesh(tensor_size: int, pipeline_size: int, timeout: timedelta | None = None) -> Mesh:
    """Creates the groups on every rank; torch.distributed must be initialised.

    Groups of the same ranks share torch's group, and one of all ranks has the world's: each has
    connections of its own, and threads that wake up a hundred times a second (gloo), or memory on
    the device (NCCL).

    Args:
        tensor_size: ranks per tensor-parallel group.
        pipeline_size: pipeline stages.
        timeout: how long a collective may take in groups of fewer ranks than the world.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    data_size, rest = divmod(world_size, tensor_size * pipeline_size)
    assert rest == 0, "the configuration checks divisibility"
    grid = rank_grid(pipeline_size, data_size, tensor_size)
    pipes, datas, tensors = range(pipeline_size), range(data_size), range(tensor_size)

    world = tuple(range(world_size))
    handles = {world: dist.group.WORLD}

    def own(memberships: list[list[int]]) -> Group:
        # Every rank must take part in creating every group, in the same order.
        found = None
        for ranks in map(tuple, memberships):
            if ranks not in handles:
                handles[ranks] = dist.new_group(list(ranks), timeout=timeout)
            if rank in ranks:
                found = Group(ranks, ranks.index(rank), handles[ranks])
        assert found is not None
        return found

    return Mesh(
        world=Group(world, rank, dist.group.WORLD),
        tensor=own([grid[p][d] for p in pipes for d in datas]),
        data=own([[grid[p][d][t] for d in datas] for p in pipes for t in tensors]),
        pipeline=own([[grid[p][d][t] for p in pipes] for d in datas for t in tensors]),
        model=own([[grid[p][d][t] for p in pipes for t in tensors] for d in datas]),
    )
