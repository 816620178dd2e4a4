"""The ranks of every group on every layout, by indexing an array of ranks."""

import math
from itertools import chain, combinations, product

import numpy as np
import pytest
import torch.distributed as dist

from megatron.parallel.mesh import (
    AXES,
    MODEL,
    REPLICAS,
    SAMPLES,
    SHARDED,
    SINGLE,
    Mesh,
    build_mesh,
    coordinates_of,
    memberships,
)
from megatron.parallel.shard import Cut, Shard
from megatron.parallel.tensor_parallel import TensorParallel

LAYOUTS = [
    dict(zip(AXES, sizes, strict=True))
    for sizes in product((1, 2, 3), (1, 2, 4), (1, 2), (1, 2), (1, 2, 4))
    if math.prod(sizes) <= 16
]
SUBSETS = list(chain.from_iterable(combinations(AXES, n) for n in range(len(AXES) + 1)))


def by_indexing(sizes: dict[str, int], axes: tuple[str, ...]) -> list[tuple[int, ...]]:
    ranks = np.arange(math.prod(sizes.values())).reshape([sizes[axis] for axis in AXES])
    last = [AXES.index(axis) for axis in AXES if axis in axes]
    count = math.prod(sizes[axis] for axis in axes)
    moved = np.moveaxis(ranks, last, range(len(AXES) - len(last), len(AXES)))
    return [tuple(map(int, group)) for group in moved.reshape(-1, count)]


@pytest.fixture
def built(monkeypatch):
    """Builds every rank's mesh, without processes; gives them, and the groups that each made."""

    def build(
        sizes: dict[str, int], backend: str = "gloo"
    ) -> tuple[list[Mesh], list[list[tuple[int, ...]]]]:
        world = math.prod(sizes.values())
        given = {axis: size for axis, size in sizes.items() if axis != "data"}
        meshes, made = [], []
        monkeypatch.setattr(dist, "get_world_size", lambda: world)
        monkeypatch.setattr(dist, "get_backend", lambda: backend)
        for rank in range(world):
            mine: list[tuple[int, ...]] = []
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            monkeypatch.setattr(dist, "new_group", lambda r, mine=mine, **_: mine.append(tuple(r)))
            meshes.append(build_mesh(given))
            made.append(mine)
        return meshes, made

    return build


@pytest.mark.parametrize("sizes", LAYOUTS, ids=lambda s: "x".join(map(str, s.values())))
def test_groups_are_the_rows_of_an_array_of_ranks(built, sizes):
    for axes in SUBSETS:
        assert memberships(sizes, axes) == by_indexing(sizes, axes), axes
    meshes, made = built(sizes)
    # A rank that makes other groups, or in another order, hangs.
    assert all(mine == made[0] for mine in made) and len(set(made[0])) == len(made[0])
    for rank, mesh in enumerate(meshes):
        named = {
            ("tensor",): mesh.tensor,
            ("pipeline",): mesh.pipeline,
            REPLICAS: mesh.dense,
            MODEL: mesh.model,
            AXES: mesh.world,
        }
        more = (("context",), ("expert",), ("data", "context"), ("expert", "tensor"))
        for axes in (*more, SAMPLES, SHARDED):
            named[axes] = mesh.group(*reversed(axes))
        for axes, group in named.items():
            assert group.ranks in by_indexing(sizes, axes)
            assert group.ranks[group.rank] == rank
        assert mesh.samples == mesh.group(*SAMPLES)
        for shard in (Shard((4,)), Shard((4, 4), (Cut(0, "expert"),)), Shard((4,), (Cut(0),))):
            assert mesh.replicas(shard) == mesh.group(*shard.reduced)
            assert mesh.replicas(shard).ranks in by_indexing(sizes, shard.reduced)
            assert math.prod(sizes.values()) == 1 or mesh.replicas(shard) in mesh.groups.values()
        tp = TensorParallel.of(mesh)
        places = np.argwhere(np.arange(len(meshes)).reshape(list(sizes.values())) == rank)[0]
        expected = {a: (int(p), n) for (a, n), p in zip(sizes.items(), places, strict=True)}
        assert mesh.coordinates == expected == coordinates_of(rank, sizes)
        assert tp.coordinates == {axis: expected[axis] for axis in ("expert", "tensor")}
        assert tp.over("expert", "tensor") == mesh.group("expert", "tensor")


@pytest.mark.parametrize("sizes", [s for s in LAYOUTS if s["context"] == s["expert"] == 1])
def test_axes_that_are_not_used_make_no_groups(built, sizes):
    """Each group has connections and threads of its own."""
    world = tuple(range(math.prod(sizes.values())))
    wanted = [("tensor",), REPLICAS, ("pipeline",), MODEL]
    expected = dict.fromkeys(chain.from_iterable(by_indexing(sizes, axes) for axes in wanted))
    expected.pop(world, None)
    _, made = built(sizes)
    assert made[0] == list(expected)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_what_stages_send_waits_for_no_collective_of_all_ranks(built, backend, tensor):
    """With NCCL a group has one stream: a pipeline of all ranks gets a second group."""
    sizes = dict.fromkeys(AXES, 1) | {"pipeline": 2, "tensor": tensor}
    meshes, made = built(sizes, backend)
    world = (0, 1)
    assert all(mesh.transfers.ranks == mesh.pipeline.ranks for mesh in meshes)
    assert made[0].count(world) == (backend == "nccl" and tensor == 1) + (tensor == 2)
    assert Mesh().transfers == SINGLE


def test_a_process_alone():
    mesh = Mesh()
    groups = [mesh.world, mesh.tensor, mesh.dense, mesh.pipeline, mesh.model, mesh.group(*AXES)]
    assert all(group == SINGLE for group in groups)
    assert set(mesh.coordinates.values()) == {(0, 1)}


def test_a_group_that_was_not_made_is_refused(built):
    meshes, _ = built(dict.fromkeys(AXES, 2) | {"context": 1})
    with pytest.raises(AssertionError, match="no group"):
        meshes[0].group("data", "tensor")
