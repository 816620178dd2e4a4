"""Cutting and joining parameters."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.model.layer_list import initialise
from megatron.parallel.mesh import AXES, MODEL, REPLICAS, SHARDED, coordinates_of
from megatron.parallel.random import generator
from megatron.parallel.shard import Cut, Init, Shard, init_of, parameter, shard_of

QUERIES = Cut(0, parts=(16, 4, 4), held=(0,))
PAIRS = Cut(0, parts=(16, 4, 4), held=(1, 2))


def at(rank, size):
    """The place of a tensor-parallel rank."""
    return {"tensor": (rank, size)}


@st.composite
def shards(draw):
    """(shard, ranks) that fit together."""
    size = draw(st.sampled_from([1, 2, 3, 4]))
    dims = draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 4)) for _ in range(dims)]
    dim = draw(st.one_of(st.none(), st.integers(0, dims - 1)))
    if dim is None:
        return Shard(tuple(shape)), size
    parts = tuple(size * n for n in draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    shape[dim] = sum(parts)
    padded = len(parts) == 1 and draw(st.booleans())
    unpadded = draw(st.integers(1, shape[dim])) if padded else None
    cut = Cut(dim, parts=parts if len(parts) > 1 else (), unpadded=unpadded)
    return Shard(tuple(shape), (cut,)), size


@given(shards())
def test_join_is_the_inverse_of_cut(case):
    shard, size = case
    count = torch.Size(shard.canonical_shape).numel()
    whole = torch.arange(1.0, count + 1).view(shard.canonical_shape)
    shares = [shard.cut(whole, at(rank, size)) for rank in range(size)]
    assert all(tuple(share.shape) == shard.local_shape(at(0, size)) for share in shares)
    assert torch.equal(shard.join(shares, {"tensor": size}), whole)
    if shard.cuts:
        # Every value is held once, and padding is zero.
        held = torch.cat([share.reshape(-1) for share in shares])
        assert torch.equal(held[held > 0].sort().values, whole.reshape(-1))


@given(shards())
def test_ranges_cover_the_whole_once(case):
    shard, size = case
    covered = [
        place
        for rank in range(size)
        for ranges in shard.ranges(at(rank, size)).values()
        for start, length in ranges
        for place in range(start, start + length)
    ]
    expected = range(shard.full_shape[shard.cuts[0].dim]) if shard.cuts else []
    assert sorted(covered) == list(expected)


def test_each_fused_part_is_cut_by_itself():
    shard = Shard((8, 1), (Cut(0, parts=(4, 2, 2)),))
    whole = torch.arange(8.0).unsqueeze(1)
    assert shard.cut(whole, at(0, 2)).squeeze(1).tolist() == [0, 1, 4, 6]
    assert shard.cut(whole, at(1, 2)).squeeze(1).tolist() == [2, 3, 5, 7]
    assert shard.ranges(at(1, 2)) == {0: ((2, 2), (5, 1), (7, 1))}


def test_padding_is_at_the_end_of_the_whole():
    shard = Shard((6, 1), (Cut(0, unpadded=3),))
    whole = torch.tensor([[1.0], [2.0], [3.0]])
    assert shard.cut(whole, at(0, 2)).squeeze(1).tolist() == [1, 2, 3]
    assert shard.cut(whole, at(1, 2)).squeeze(1).tolist() == [0, 0, 0]
    assert shard.canonical_shape == (3, 1)


def test_shares_that_do_not_divide_are_refused():
    with pytest.raises(AssertionError):
        Shard((8, 2), (Cut(0, parts=(5, 3)),)).local_shape(at(0, 2))
    with pytest.raises(AssertionError):
        Shard((8,), (Cut(0, parts=(5, 2)),))
    with pytest.raises(AssertionError):
        Shard((8,), (Cut(0), Cut(0, "expert")))
    with pytest.raises(AssertionError):
        Shard((8, 8), (Cut(0), Cut(1)))
    with pytest.raises(AssertionError):
        Shard((8,), (Cut(0, "expert", copies=2),))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "shard",
    [
        Shard((16, 4), (Cut(0, parts=(8, 4, 4)),)),
        Shard((4, 16), (Cut(1),)),
        Shard((16, 4), (Cut(0, unpadded=13),)),
        Shard((16,)),
    ],
    ids=["fused", "rows", "padded", "whole"],
)
def test_initial_values_are_the_same_whatever_the_tensor_size(shard, size):
    init = Init(std=0.02)
    whole = parameter(shard, init)
    initialise("layers.0.x", whole, 1234)
    shares = []
    for rank in range(size):
        shares.append(parameter(shard, init, at(rank, size)))
        initialise("layers.0.x", shares[-1], 1234, at(rank, size))
    joined = shard.join([share.detach() for share in shares], {"tensor": size})
    assert torch.equal(joined, shard.join([whole.detach()]))
    drawn = init.draw(shard.canonical_shape, generator(1234, "layers.0.x"))
    assert torch.equal(joined, drawn) and 0.01 < float(drawn.std()) < 0.03


def test_initial_values_depend_on_seed_and_name():
    def draw(name, seed):
        param = parameter(Shard((8,)), Init(std=1.0))
        initialise(name, param, seed)
        return param.detach()

    assert torch.equal(draw("a", 1), draw("a", 1))
    assert not torch.equal(draw("a", 1), draw("b", 1))
    assert not torch.equal(draw("a", 1), draw("a", 2))


def test_a_constant_is_filled_in():
    param = parameter(Shard((4,)), Init(constant=1.0))
    initialise("norm", param, 1)
    assert param.tolist() == [1.0] * 4


def test_a_parameter_carries_its_descriptions():
    shard, init = Shard((8, 2), (Cut(0),)), Init(std=0.1)
    param = parameter(shard, init, at(3, 4))
    assert tuple(param.shape) == (2, 2) and shard_of(param) is shard and init_of(param) is init


@pytest.mark.parametrize(
    "shard, counted",
    [
        (Shard((8, 2), (Cut(0),)), [True, True, True, True]),
        (Shard((8, 2)), [True, False, False, False]),
        (Shard((24, 2), (QUERIES,)), [True, True, True, True]),
        (Shard((24, 2), (replace(PAIRS, copies=2),)), [True, False, True, False]),
        (Shard((24, 2), (replace(PAIRS, copies=4),)), [True, False, False, False]),
    ],
    ids=["cut", "whole", "queries", "two copies", "four copies"],
)
def test_one_copy_counts(shard, counted):
    assert [shard.counted(at(rank, 4)) for rank in range(4)] == counted
    # DeepSpeed's gradient norm reads this mark.
    marks = [parameter(shard, Init(), at(r, 4)).tensor_model_parallel for r in range(4)]
    assert marks == counted


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("heads", [1, 2])
def test_parts_held_apart_make_up_the_whole(heads, size):
    parts, copies = (16, 2 * heads, 2 * heads), max(1, size // heads)
    whole = torch.arange(float(sum(parts))).view(-1, 1)
    queries = Shard(tuple(whole.shape), (Cut(0, parts=parts, held=(0,)),))
    pairs = Shard(tuple(whole.shape), (Cut(0, parts=parts, held=(1, 2), copies=copies),))
    found = torch.full_like(whole, -1.0)
    for shard in (queries, pairs):
        shares = [shard.cut(whole, at(rank, size)) for rank in range(size)]
        assert all(tuple(share.shape) == shard.local_shape(at(0, size)) for share in shares)
        for rank, share in enumerate(shares):
            if shard.counted(at(rank, size)):
                assert (shard.cut(found, at(rank, size)) == -1.0).all(), "written twice"
                shard.place(found, share, at(rank, size))
            else:
                assert torch.equal(share, shares[rank - 1])
    assert torch.equal(found, whole)


def test_neighbours_hold_the_head_that_their_queries_attend_to():
    """Rank r of t has queries of head group r * K // t."""
    shard = Shard((24, 1), (replace(PAIRS, copies=2),))
    whole = torch.arange(24.0).unsqueeze(1)
    held = [shard.cut(whole, at(rank, 4)).squeeze(1).tolist() for rank in range(4)]
    assert held == [[16, 17, 20, 21], [16, 17, 20, 21], [18, 19, 22, 23], [18, 19, 22, 23]]


@st.composite
def products(draw):
    """(shard, sizes): two dimensions of two or three, each cut over an axis of its own."""
    sizes = {"expert": draw(st.sampled_from([1, 2, 3])), "tensor": draw(st.sampled_from([1, 2, 4]))}
    shape = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(2, 3)))]
    dims, cuts = draw(st.permutations(range(len(shape)))), []
    for dim, (axis, size) in zip(dims, sizes.items(), strict=False):
        widths = draw(st.lists(st.integers(1, 2), min_size=1, max_size=3))
        parts = tuple(size * width for width in widths)
        shape[dim] = sum(parts)
        padded = draw(st.booleans())
        unpadded = draw(st.integers(1, shape[dim])) if padded else None
        cuts.append(Cut(dim, axis, parts if len(parts) > 1 else (), unpadded=unpadded))
    return Shard(tuple(shape), tuple(draw(st.permutations(cuts)))), sizes


def indices(cut, length, rank, size):
    """What of a dimension a rank has, by splitting its numbers."""
    ends = np.cumsum(cut.parts or (length,))[:-1]
    parts = np.split(np.arange(length), ends)
    return np.concatenate([np.split(part, size)[rank] for part in parts])


@given(products())
def test_two_cuts_against_indexing(case):
    shard, sizes = case
    whole = np.arange(1.0, 1 + np.prod(shard.canonical_shape)).reshape(shard.canonical_shape)
    missing = np.subtract(shard.full_shape, shard.canonical_shape)
    padded = np.pad(whole, [(0, count) for count in missing])
    shares, ranks = [], range(sizes["expert"] * sizes["tensor"])
    for place in (coordinates_of(rank, sizes) for rank in ranks):
        held = [np.arange(length) for length in shard.full_shape]
        for cut in shard.cuts:
            held[cut.dim] = indices(cut, shard.full_shape[cut.dim], *place[cut.axis])
        share = shard.cut(torch.from_numpy(whole), place)
        assert tuple(share.shape) == shard.local_shape(place)
        np.testing.assert_array_equal(share, padded[np.ix_(*held)])
        assert shard.counted(place)
        alone = torch.zeros(whole.shape, dtype=torch.float64)
        shard.place(alone, share, place)
        np.testing.assert_array_equal(alone, np.where(np.isin(whole, share), whole, 0))
        shares.append(share)
    assert np.array_equal(shard.join(shares, sizes), whole)
    assert shard.reduced == ("data", "context")


def test_copies_among_axes():
    """Of a matrix of experts, and of a vector that all ranks have, on two replicas."""
    sizes = {"pipeline": 2, "data": 2, "expert": 2, "tensor": 2}
    experts, vector = Shard((4, 8), (Cut(0, "expert"), Cut(1))), Shard((8,))
    assert experts.reduced == ("data", "context") and vector.reduced == REPLICAS
    for rank in range(16):
        place = coordinates_of(rank, sizes)
        data, expert, tensor = (place[axis][0] for axis in ("data", "expert", "tensor"))
        for shard, among, counted in [
            (experts, AXES, data == 0),
            (experts, SHARDED, True),
            (experts, MODEL, True),
            (vector, AXES, data == expert == tensor == 0),
            (vector, SHARDED, expert == tensor == 0),
            (vector, MODEL, tensor == 0),
        ]:
            assert shard.counted(place, among) == counted, (place, among)


def test_one_dimension_over_two_axes():
    """Is cut as over one axis with the ranks of both, the first slowest."""
    sizes = {"pipeline": 1, "data": 2, "expert": 2, "tensor": 3}
    joint = Shard((12, 4), (Cut(0, ("expert", "tensor")),))
    alone, whole = Shard((12, 4), (Cut(0),)), torch.arange(48.0).view(12, 4)
    assert joint.over("expert") is joint.over("tensor") is joint.cuts[0]
    assert joint.reduced == ("data", "context")
    shares = []
    for rank in range(12):
        place = coordinates_of(rank, sizes)
        single = {"tensor": (place["expert"][0] * 3 + place["tensor"][0], 6)}
        shares.append(joint.cut(whole, place))
        assert torch.equal(shares[-1], alone.cut(whole, single))
        assert joint.local_shape(place) == (2, 4) and joint.counted(place, SHARDED)
        assert joint.counted(place) == (place["data"][0] == 0)
    assert torch.equal(joint.join(shares, sizes), whole)
    assert joint.join([whole]) is not whole and torch.equal(joint.join([whole]), whole)
    with pytest.raises(AssertionError):
        Shard((12, 4), (Cut(0, ("expert", "tensor")), Cut(1)))
