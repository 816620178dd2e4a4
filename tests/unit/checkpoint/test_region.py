"""The algebra of regions against the same by indexing, on random shapes and cuts."""

import math
import random

import pytest
import torch

from megatron.checkpoint.region import Region, region_of
from megatron.parallel.shard import Shard

SHAPES = [(12, 6), (6,), (12, 4, 3), (24,)]


def random_region(rng, shape):
    """Elements of a share that consists of up to three ranges of rows or columns."""
    while True:
        dim = rng.choice([None, 0, 1]) if len(shape) > 1 else rng.choice([None, 0])
        ranges = ()
        if dim is not None:
            count = 2 * rng.randint(1, min(3, (shape[dim] + 1) // 2))
            bounds = sorted(rng.sample(range(shape[dim] + 1), count))
            ranges = tuple((a, b - a) for a, b in zip(bounds[::2], bounds[1::2], strict=True))
        numel = math.prod(Region(shape, dim, ranges, 0, 0).share_shape)
        start, end = sorted(rng.sample(range(numel + 1), 2))
        if end > start:
            return Region(shape, dim, ranges, start, end)


def elements(region, whole):
    """The elements of a region, by definition."""
    if region.dim is not None:
        pieces = [whole.narrow(region.dim, *taken) for taken in region.ranges]
        whole = torch.cat(pieces, region.dim)
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
        Shard((16, 6), 0, unpadded=11),
        Shard((24, 6), 0, parts=(8, 8, 8)),
        Shard((6, 8), 1),
        Shard((6,)),
    ]
    for shard in shards:
        whole = torch.arange(1, 1 + math.prod(shard.canonical_shape)).view(shard.canonical_shape)
        for rank in range(size):
            share = shard.cut(whole, rank, size).reshape(-1)
            for start in range(0, share.numel(), 5):
                end = min(start + 5, share.numel())
                region = region_of(shard, rank, size, start, end)
                kept = share[start:end][share[start:end] > 0]
                assert (region is None) == (kept.numel() == 0)
                assert region is None or torch.equal(region.cut(whole), kept)
