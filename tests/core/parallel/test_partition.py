"""Cutting a layer list into stages."""

import itertools

import pytest

from megatron.parallel.pipeline_schedules import stage_bounds


def layers(blocks, before=2, after=2):
    return [False] * before + [True] * blocks + [False] * after


def test_blocks_are_spread_evenly_and_the_ends_go_with_them():
    assert stage_bounds(layers(8), [0] * 12, 4, "blocks") == [0, 4, 6, 8, 12]
    # One over: to a middle stage, away from embedding and head.
    assert stage_bounds(layers(9), [0] * 13, 4, "blocks") == [0, 4, 7, 9, 13]


def test_explicit_numbers():
    assert stage_bounds(layers(6), [0] * 10, 3, "1,3,2") == [0, 3, 6, 10]


def test_blocks_of_different_costs_are_balanced():
    """Two cheap blocks for one that costs as much; equal costs are equal numbers."""
    costs = [0, 0, 1, 1, 1, 1, 2, 2, 0, 0]
    assert stage_bounds(layers(6), [0] * 10, 2, "blocks", costs) == [0, 6, 10]
    assert stage_bounds(layers(6), [0] * 10, 4, "blocks", costs) == [0, 4, 6, 7, 10]
    assert stage_bounds(layers(6), [0] * 10, 2, "blocks", [5] * 10) == [0, 5, 10]
    assert stage_bounds(layers(6), [0] * 10, 2, "3,3", costs) == [0, 5, 10]


def test_a_layer_stays_with_the_block_it_belongs_to():
    blocks = [False, True, False, False, True, False, True]
    with_next = [False, False, True, True, False, True, False]
    assert stage_bounds(blocks, [0] * 7, 3, "blocks", with_next_block=with_next) == [0, 2, 5, 7]
    assert stage_bounds(blocks, [0] * 7, 3, "blocks") == [0, 4, 6, 7]


@pytest.mark.parametrize("method", ["1,2", "1,2,4", "0,3,3", "1,2,x", "layers"])
def test_numbers_that_do_not_fit_are_named(method):
    with pytest.raises(ValueError, match=f"--pipeline-partition {method}"):
        stage_bounds(layers(6), [0] * 10, 3, method)


def test_more_stages_than_blocks():
    with pytest.raises(ValueError, match="2 blocks cannot be cut into 3"):
        stage_bounds(layers(2), [0] * 6, 3, "blocks")


@pytest.mark.parametrize("ends", [(0, 0), (7, 0), (0, 30), (50, 50), (3, 200)])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_parameters_are_balanced_as_well_as_can_be(stages, ends):
    """Against trying every way of cutting seven unequal blocks."""
    blocks, weights = 7, [ends[0], 0, *(10, 12, 9, 10, 30, 10, 11), 0, ends[1]]
    bounds = stage_bounds(layers(blocks), weights, stages, "parameters")

    def heaviest(cuts):
        return max(sum(weights[a:b]) for a, b in itertools.pairwise(cuts))

    best = min(
        heaviest([0, *cuts, len(weights)])
        for cuts in itertools.combinations(range(3, 2 + blocks), stages - 1)
    )
    assert heaviest(bounds) == best
    assert bounds[0] == 0 and bounds[-1] == len(weights)
    assert all(any(2 <= p < 9 for p in range(a, b)) for a, b in itertools.pairwise(bounds))
