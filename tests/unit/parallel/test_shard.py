"""Cutting and joining parameters."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.model.layer_list import initialise
from megatron.parallel.mesh import SINGLE, Group
from megatron.parallel.random import generator
from megatron.parallel.shard import Init, Shard, init_of, parameter, shard_of


def ranks(size, rank):
    return Group(tuple(range(size)), rank)


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
    return Shard(tuple(shape), dim, parts if len(parts) > 1 else (), unpadded), size


@given(shards())
def test_join_is_the_inverse_of_cut(case):
    shard, size = case
    count = torch.Size(shard.canonical_shape).numel()
    whole = torch.arange(1.0, count + 1).view(shard.canonical_shape)
    shares = [shard.cut(whole, rank, size) for rank in range(size)]
    assert all(tuple(share.shape) == shard.local_shape(size) for share in shares)
    assert torch.equal(shard.join(shares), whole)
    if shard.dim is not None:
        # Every value is held once, and padding is zero.
        held = torch.cat([share.reshape(-1) for share in shares])
        assert torch.equal(held[held > 0].sort().values, whole.reshape(-1))


@given(shards())
def test_ranges_cover_the_whole_once(case):
    shard, size = case
    covered = [
        place
        for rank in range(size)
        for start, length in shard.ranges(rank, size)
        for place in range(start, start + length)
    ]
    expected = [] if shard.dim is None else range(shard.full_shape[shard.dim])
    assert sorted(covered) == list(expected)


def test_each_fused_part_is_cut_by_itself():
    shard = Shard((8, 1), 0, (4, 2, 2))
    whole = torch.arange(8.0).unsqueeze(1)
    assert shard.cut(whole, 0, 2).squeeze(1).tolist() == [0, 1, 4, 6]
    assert shard.cut(whole, 1, 2).squeeze(1).tolist() == [2, 3, 5, 7]
    assert shard.ranges(1, 2) == [(2, 2), (5, 1), (7, 1)]


def test_padding_lies_at_the_end_of_the_whole():
    shard = Shard((6, 1), 0, unpadded=3)
    whole = torch.tensor([[1.0], [2.0], [3.0]])
    assert shard.cut(whole, 0, 2).squeeze(1).tolist() == [1, 2, 3]
    assert shard.cut(whole, 1, 2).squeeze(1).tolist() == [0, 0, 0]
    assert shard.canonical_shape == (3, 1)


def test_shares_that_do_not_divide_are_refused():
    with pytest.raises(AssertionError):
        Shard((8, 2), 0, (5, 3)).local_shape(2)
    with pytest.raises(AssertionError):
        Shard((8,), 0, (5, 2))
    with pytest.raises(AssertionError):
        Shard((8,), unpadded=3)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "shard",
    [
        Shard((16, 4), 0, (8, 4, 4)),
        Shard((4, 16), 1),
        Shard((16, 4), 0, unpadded=13),
        Shard((16,)),
    ],
    ids=["fused", "rows", "padded", "whole"],
)
def test_initial_values_are_the_same_whatever_the_tensor_size(shard, size):
    init = Init(std=0.02)
    whole = parameter(shard, init, SINGLE)
    initialise("layers.0.x", whole, 1234, 0, 1)
    shares = []
    for rank in range(size):
        shares.append(parameter(shard, init, ranks(size, rank)))
        initialise("layers.0.x", shares[-1], 1234, rank, size)
    joined = shard.join([share.detach() for share in shares])
    assert torch.equal(joined, shard.join([whole.detach()]))
    drawn = init.draw(shard.canonical_shape, generator(1234, "layers.0.x"))
    assert torch.equal(joined, drawn) and 0.01 < float(drawn.std()) < 0.03


def test_initial_values_depend_on_seed_and_name():
    def draw(name, seed):
        param = parameter(Shard((8,)), Init(std=1.0), SINGLE)
        initialise(name, param, seed, 0, 1)
        return param.detach()

    assert torch.equal(draw("a", 1), draw("a", 1))
    assert not torch.equal(draw("a", 1), draw("b", 1))
    assert not torch.equal(draw("a", 1), draw("a", 2))


def test_a_constant_is_filled_in():
    param = parameter(Shard((4,)), Init(constant=1.0), SINGLE)
    initialise("norm", param, 1, 0, 1)
    assert param.tolist() == [1.0] * 4


def test_a_parameter_carries_its_descriptions():
    shard, init = Shard((8, 2), 0), Init(std=0.1)
    param = parameter(shard, init, ranks(4, 3))
    assert tuple(param.shape) == (2, 2) and shard_of(param) is shard and init_of(param) is init


@pytest.mark.parametrize(
    "shard, counted",
    [
        (Shard((8, 2), 0), [True, True, True, True]),
        (Shard((8, 2)), [True, False, False, False]),
        (Shard((24, 2), 0, (16, 4, 4), held=(0,)), [True, True, True, True]),
        (Shard((24, 2), 0, (16, 4, 4), held=(1, 2), copies=2), [True, False, True, False]),
        (Shard((24, 2), 0, (16, 4, 4), held=(1, 2), copies=4), [True, False, False, False]),
    ],
    ids=["cut", "whole", "queries", "two copies", "four copies"],
)
def test_one_copy_counts(shard, counted):
    assert [shard.counted(rank, 4) for rank in range(4)] == counted
    # DeepSpeed's gradient norm reads this mark.
    marks = [parameter(shard, Init(), ranks(4, r)).tensor_model_parallel for r in range(4)]
    assert marks == counted


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("heads", [1, 2])
def test_parts_held_apart_make_up_the_whole(heads, size):
    parts, copies = (16, 2 * heads, 2 * heads), max(1, size // heads)
    whole = torch.arange(float(sum(parts))).view(-1, 1)
    queries = Shard(tuple(whole.shape), 0, parts, held=(0,))
    pairs = Shard(tuple(whole.shape), 0, parts, held=(1, 2), copies=copies)
    found = torch.full_like(whole, -1.0)
    for shard in (queries, pairs):
        shares = [shard.cut(whole, rank, size) for rank in range(size)]
        assert all(tuple(share.shape) == shard.local_shape(size) for share in shares)
        for rank, share in enumerate(shares):
            if shard.counted(rank, size):
                assert (shard.cut(found, rank, size) == -1.0).all(), "written twice"
                shard.place(found, share, rank, size)
            else:
                assert torch.equal(share, shares[rank - 1])
    assert torch.equal(found, whole)


def test_neighbours_hold_the_head_that_their_queries_attend_to():
    """Rank r of t has queries of head group r * K // t."""
    shard = Shard((24, 1), 0, (16, 4, 4), held=(1, 2), copies=2)
    whole = torch.arange(24.0).unsqueeze(1)
    held = [shard.cut(whole, rank, 4).squeeze(1).tolist() for rank in range(4)]
    assert held == [[16, 17, 20, 21], [16, 17, 20, 21], [18, 19, 22, 23], [18, 19, 22, 23]]
