"""The algebra of regions against the same by indexing, on random shapes and cuts."""

import math
import random

import pytest
import torch

from megatron.checkpoint.region import Region, region_of
from megatron.parallel.shard import Cut, Shard

SHAPES = [(12, 6), (6,), (12, 4, 3), (24,), (3, 4, 2, 3)]


def random_ranges(rng, length):
    """Up to three ranges along a dimension, which may touch."""
    count = rng.randint(1, min(3, (length + 1) // 2))
    bounds = sorted(rng.choices(range(length + 1), k=2 * count))
    pairs = zip(bounds[::2], bounds[1::2], strict=True)
    return tuple((a, b - a) for a, b in pairs if a < b)


def random_region(rng, shape):
    """Elements of a share that is cut along any of the dimensions."""
    while True:
        cut = [dim for dim in range(len(shape)) if rng.random() < 0.5]
        cuts = tuple((dim, random_ranges(rng, shape[dim])) for dim in cut)
        numel = math.prod(Region(shape, cuts, 0, 0).share_shape)
        start, end = sorted(rng.choices(range(numel + 1), k=2))
        if end > start:
            return Region(shape, cuts, start, end)


def elements(region, whole):
    """The elements of a region, by definition."""
    for dim, ranges in region.cuts:
        whole = torch.cat([whole.narrow(dim, *taken) for taken in ranges], dim)
    return whole.reshape(-1)[region.start : region.end]


@pytest.mark.parametrize("shape", SHAPES)
def test_cut_is_the_definition(shape):
    rng, whole = random.Random(1), torch.arange(math.prod(shape)).view(shape)
    for _ in range(300):
        region = random_region(rng, shape)
        assert torch.equal(region.cut(whole), elements(region, whole)), region


@pytest.mark.parametrize("shape", SHAPES)
def test_overlaps_copy_what_both_hold_and_nothing_else(shape):
    rng, whole = random.Random(2), torch.arange(math.prod(shape)).view(shape)
    met = 0
    for _ in range(500):
        here, there = random_region(rng, shape), random_region(rng, shape)
        mine, theirs = elements(here, whole), elements(there, whole)
        target, copied = torch.full_like(mine, -1), 0
        overlaps = list(here.overlaps(there))
        if overlaps:
            first = min(overlap.there for overlap in overlaps)
            end = max(overlap.end_there() for overlap in overlaps)
            for overlap in overlaps:
                overlap.copy(target, theirs[first:end].clone(), first)
                copied += math.prod(overlap.shape)
        both = torch.isin(mine, theirs)
        assert torch.equal(target, torch.where(both, mine, -1)), (here, there)
        assert copied == int(both.sum())
        met += copied > 0
    assert met > 100


@pytest.mark.parametrize("size", [1, 2, 4])
def test_regions_of_shards_are_their_cuts_less_the_padding(size):
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
                region = region_of(shard, place, start, end)
                kept = share[start:end][share[start:end] > 0]
                assert (region is None) == (kept.numel() == 0)
                assert region is None or torch.equal(region.cut(whole), kept)


def test_elements_that_lie_together_are_one_block():
    """Fused parts of which a process holds all are no more work than one."""
    parts = ((0, ((0, 8), (8, 8), (16, 8))),)
    assert len(Region((24, 6), parts, 0, 144).blocks) == 1
