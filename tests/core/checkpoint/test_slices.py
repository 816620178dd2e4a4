"""The algebra of slices against the same by indexing, on random shapes and cuts; what tiles."""

import dataclasses
import math
import random

import pytest
import torch

from megatron.checkpoint.slices import Slice, tiles
from megatron.parallel.shard import Cut, Shard

SHAPES = [(12, 6), (6,), (12, 4, 3), (24,), (3, 4, 2, 3)]


def random_ranges(rng, length):
    """Up to three ranges along a dimension, which may touch."""
    count = rng.randint(1, min(3, (length + 1) // 2))
    bounds = sorted(rng.choices(range(length + 1), k=2 * count))
    pairs = zip(bounds[::2], bounds[1::2], strict=True)
    return tuple((a, b - a) for a, b in pairs if a < b)


def random_slice(rng, shape):
    """Elements of a share that is cut along any of the dimensions."""
    while True:
        cut = [dim for dim in range(len(shape)) if rng.random() < 0.5]
        cuts = tuple((dim, random_ranges(rng, shape[dim])) for dim in cut)
        numel = math.prod(Slice(shape, cuts, 0, 0).share_shape)
        start, end = sorted(rng.choices(range(numel + 1), k=2))
        if end > start:
            return Slice(shape, cuts, start, end)


def elements(held, whole):
    """The elements of a slice, by definition."""
    for dim, ranges in held.cuts:
        whole = torch.cat([whole.narrow(dim, *taken) for taken in ranges], dim)
    return whole.reshape(-1)[held.start : held.end]


@pytest.mark.parametrize("shape", SHAPES)
def test_cut_is_the_definition(shape):
    rng, whole = random.Random(1), torch.arange(math.prod(shape)).view(shape)
    for _ in range(300):
        held = random_slice(rng, shape)
        assert torch.equal(held.cut(whole), elements(held, whole)), held


@pytest.mark.parametrize("shape", SHAPES)
def test_an_overlap_is_what_both_hold_and_nothing_else(shape):
    rng, whole = random.Random(2), torch.arange(math.prod(shape)).view(shape)
    met = 0
    for _ in range(500):
        here, there = random_slice(rng, shape), random_slice(rng, shape)
        mine, theirs = elements(here, whole), elements(there, whole)
        target, copied = torch.full_like(mine, -1), 0
        common = here.overlap(there)
        if common is not None:
            common.copy(target, theirs[common.first : common.end].clone())
            copied = common.numel
        both = torch.isin(mine, theirs)
        assert torch.equal(target, torch.where(both, mine, -1)), (here, there)
        assert copied == int(both.sum())
        met += copied > 0
    assert met > 100


@pytest.mark.parametrize("size", [1, 2, 4])
def test_slices_of_shards_are_their_cuts_less_the_padding(size):
    shards = [
        Shard((16, 6), (Cut(0, unpadded=11),)),
        Shard((24, 6), (Cut(0, parts=(8, 8, 8)),)),
        Shard((6, 8), (Cut(1),)),
        Shard((6,)),
        Shard((16, 4), (Cut(0, unpadded=11), Cut(1, "expert"))),
        Shard((4, 12, 3), (Cut(1, parts=(8, 4)), Cut(0, "expert"))),
    ]
    places = [
        {"tensor": (tensor, size), "expert": (expert, 2)}
        for tensor in range(size)
        for expert in range(2)
    ]
    for shard in shards:
        whole = torch.arange(1, 1 + math.prod(shard.canonical_shape)).view(shard.canonical_shape)
        for place in places:
            share = shard.cut(whole, place).reshape(-1)
            for start in range(0, share.numel(), 5):
                end = min(start + 5, share.numel())
                held = Slice.of(shard, place, start, end)
                kept = share[start:end][share[start:end] > 0]
                assert held.numel == kept.numel() and torch.equal(held.cut(whole), kept)


def test_elements_that_lie_together_are_one_box():
    """Fused parts of which a process holds all are no more work than one."""
    parts = ((0, ((0, 8), (8, 8), (16, 8))),)
    assert len(Slice((24, 6), parts, 0, 144)._boxes) == 1


def cut(dim, ranges, start, end, shape=(8, 6)):
    """A run of a share that is cut along one dimension, or none."""
    cuts = () if dim is None else ((dim, tuple(ranges)),)
    return Slice(shape, cuts, start, end)


def cut_twice(rows, columns, start, end):
    """A run of a share that is cut along both dimensions."""
    return Slice((8, 6), ((0, tuple(rows)), (1, tuple(columns))), start, end)


TILINGS = {
    "whole": [cut(None, [], 0, 48)],
    "runs": [cut(None, [], 0, 17), cut(None, [], 17, 48)],
    "rows": [cut(0, [(0, 4)], 0, 24), cut(0, [(4, 4)], 0, 24)],
    "columns": [cut(1, [(0, 3)], 0, 24), cut(1, [(3, 3)], 0, 24)],
    "gate and up": [cut(0, [(0, 2), (4, 2)], 0, 24), cut(0, [(2, 2), (6, 2)], 0, 24)],
    "rows and columns": [
        cut_twice([(0, 2), (4, 2)], [(0, 3)], 0, 12),
        cut_twice([(0, 2), (4, 2)], [(3, 3)], 0, 12),
        cut_twice([(2, 2), (6, 2)], [(0, 3)], 0, 7),
        cut_twice([(2, 2), (6, 2)], [(3, 3)], 0, 12),
        cut_twice([(2, 2), (6, 2)], [(0, 3)], 7, 12),
    ],
    "rows and runs": [
        cut(0, [(0, 5)], 11, 30),
        cut(0, [(5, 3)], 0, 18),
        cut(0, [(0, 5)], 0, 11),
    ],
}


@pytest.mark.parametrize("name", TILINGS)
def test_tilings(name):
    """Against marking each element: whole, and with any slice missing, doubled or moved."""
    slices = TILINGS[name]
    assert tiles((8, 6), slices)
    for number, one in enumerate(slices):
        others = slices[:number] + slices[number + 1 :]
        shorter = dataclasses.replace(one, end=one.end - 1)
        moved = dataclasses.replace(one, start=one.start + 1, end=one.end + 1)
        for wrong in (others, [*slices, one], [*others, shorter], [*others, moved]):
            assert not tiles((8, 6), wrong)


def test_equal_sums_do_not_deceive():
    """Two slices that overlap have as many elements as two that do not."""
    assert not tiles((8, 6), [cut(None, [], 0, 24), cut(None, [], 0, 24)])
    assert not tiles((8, 6), [cut(0, [(0, 4)], 0, 24), cut(0, [(2, 4)], 0, 24)])
    assert not tiles((8, 6), [cut(0, [(0, 4)], 0, 24), cut(1, [(0, 3)], 0, 24)])
    corners = [([(0, 4)], [(0, 3)]), ([(4, 4)], [(3, 3)])]
    assert not tiles((8, 6), [cut_twice(*corner, 0, 12) for corner in corners])
