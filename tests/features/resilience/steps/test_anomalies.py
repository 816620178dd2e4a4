"""What several results of one step mean."""

import math

from megatron.features.resilience.steps.second_look import (
    Computed,
    changed,
    odd_batches,
    wrong_ranks,
)


def computed(rank, of, *losses, squares=1.0):
    return Computed(rank, f"node{rank}", (0, 0), of, losses, squares)


def test_another_result_the_second_time_is_a_fault_of_its_rank():
    first = [computed(0, 0, 2.0, 2.1), computed(1, 1, 2.0, 2.2)]
    assert changed(first, first) == []
    again = [computed(0, 0, 2.0 + 1e-6, 2.1), computed(1, 1, 2.0, 2.9)]
    assert [each.rank for each in changed(first, again)] == [1]
    again = [computed(0, 0, 2.0, 2.1, squares=3.0), computed(1, 1, 2.0, 2.2)]
    assert [each.rank for each in changed(first, again)] == [0]
    again = [computed(0, 0, 2.0, math.nan), computed(1, 1, 2.0, 2.2)]
    assert [each.rank for each in changed(first, again)] == [0]
    assert changed(again, again) == []  # NaN both times


def exchanged(ranks, wrong, usual, far):
    """Own and exchanged results, of which those of one rank are another number."""

    def loss(rank, of):
        return far if rank == wrong else usual + 0.01 * of

    own = [computed(rank, rank, loss(rank, rank)) for rank in range(ranks)]
    return own, [computed(r, (r + 1) % ranks, loss(r, (r + 1) % ranks)) for r in range(ranks)]


def test_a_rank_that_computes_otherwise_than_two_others_is_wrong():
    for ranks in (3, 4, 8):
        for wrong in range(ranks):
            found = wrong_ranks(*exchanged(ranks, wrong, 2.0, 2.1), usual=2.0)
            assert [each.rank for each in found] == [wrong]


def test_of_two_ranks_the_one_that_is_far_from_usual_is_wrong():
    for wrong in (0, 1):
        for far in (5.0, 0.1, math.inf, math.nan):
            found = wrong_ranks(*exchanged(2, wrong, 2.0, far), usual=2.0)
            assert [each.rank for each in found] == [wrong]
    # As far on both sides: nobody knows.
    own = [computed(0, 0, 1.0), computed(1, 1, 4.0)]
    theirs = [computed(0, 1, 1.0), computed(1, 0, 4.0)]
    assert [each.rank for each in wrong_ranks(own, theirs, usual=2.0)] == [0, 1]


def test_equal_results_are_nobody_s_fault():
    assert wrong_ranks(*exchanged(4, None, 2.0, 2.0), usual=2.0) == []
    assert wrong_ranks(*exchanged(2, None, math.nan, 2.0), usual=2.0) == []


def test_few_batches_that_stand_out_are_bad_data():
    losses = [computed(0, 0, 2.0, 2.1), computed(1, 1, 2.05, 7.0)]
    odd = odd_batches(losses, usual=2.0)
    assert odd.batches == ((1, 1),) and odd.few
    assert odd_batches([computed(0, 0, 2.0, 0.01, 2.1)], 2.0).batches == ((0, 1),)
    assert odd_batches([computed(0, 0, 2.0, math.nan, 2.1)], None).batches == ((0, 1),)


def test_where_most_stand_out_the_training_diverges():
    odd = odd_batches([computed(0, 0, 7.0, 6.0), computed(1, 1, 8.0, 9.0)], usual=2.0)
    assert len(odd.batches) == odd.total == 4 and not odd.few
    assert not odd_batches([computed(0, 0, math.nan)] * 2, None).few


def test_ordinary_noise_stands_out_nowhere():
    odd = odd_batches([computed(0, 0, 2.0, 2.4), computed(1, 1, 1.7, 2.2)], usual=2.0)
    assert odd.batches == () and not odd.few
    assert odd_batches([computed(0, 0)], None).total == 0  # a stage without losses
