"""Schedules in time against the formulas of their papers."""

from fractions import Fraction

import pytest

from megatron.parallel.pipeline_schedules import PipelineSchedule
from megatron.parallel.timeline import (
    inputs,
    simulate,
    simulate_order,
    theory,
)

SHAPES = [("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("dualpipev", 2)]


@pytest.mark.parametrize("name, chunks", SHAPES)
@pytest.mark.parametrize("forward_only", [False, True])
def test_every_rule_of_a_timeline_holds(schedules, name, chunks, forward_only):
    for schedule in schedules(name, chunks, forward_only):
        timeline = simulate(schedule, 1.0, 1.5, transfer_time=0.25)
        slots = {slot.action: slot for slot in timeline.slots}
        directions = 1 if forward_only else 2
        assert len(slots) == directions * schedule.stages * schedule.micro_batches
        for action, slot in slots.items():
            assert slot.rank == schedule.rank_of(action.stage)
            assert slot.end - slot.start == Fraction(3 if action.backward else 2, 2 * chunks)
            moments = [Fraction(0)]
            moments += [
                slots[needed].end + Fraction(slots[needed].rank != slot.rank, 4)
                for needed in inputs(schedule, action)
            ]
            own = schedule.actions(slot.rank)
            place = own.index(action)
            moments += [slots[own[place - 1]].end] if place else []
            assert slot.start == max(moments)


@pytest.mark.parametrize("times", [(1, 2), (1, 1), (0.3, 0.7), (2, 1)])
@pytest.mark.parametrize("name, chunks", SHAPES[:3])
def test_bubble_against_narayanan(schedules, name, chunks, times):
    for schedule in schedules(name, chunks):
        timeline = simulate(schedule, *times)
        ranks, micro_batches = schedule.ranks, schedule.micro_batches
        assert timeline.bubble_ratio == theory(name, ranks, chunks, micro_batches)
        ideal = micro_batches * (Fraction(times[0]) + Fraction(times[1]))
        assert timeline.bubble_share == 1 - ideal / timeline.span


def test_bubble_figures():
    """Interleaving divides the bubble by the number of chunks; DualPipeV lies between."""
    spans = {
        (name, chunks): simulate(PipelineSchedule(name, 4, chunks, 8)).span
        for name, chunks in SHAPES
    }
    assert spans == {
        ("1f1b", 1): 33,
        ("interleaved", 2): Fraction(57, 2),
        ("interleaved", 3): 27,
        ("dualpipev", 2): Fraction(59, 2),
    }
    assert theory("dualpipev", 4, 2, 8) is None


def test_dualpipev_bubble_as_counted(schedules):
    """No published formula fits (see theory); docs/guides/schedules.md gives this one."""
    for schedule in schedules("dualpipev", 2):
        ranks = schedule.ranks
        expected = Fraction(4 * ranks - 5, 6 * schedule.micro_batches) if ranks > 1 else 0
        assert simulate(schedule).bubble_ratio == expected


def test_1f1b_holds_a_micro_batch_per_rank_that_follows(schedules):
    for schedule in schedules("1f1b", 1):
        ranks, micro_batches = schedule.ranks, schedule.micro_batches
        expected = [min(ranks - rank, micro_batches) for rank in range(ranks)]
        assert list(simulate(schedule).peak_activations) == expected


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_activations_of_interleaved_against_korthikanti(ranks, chunks):
    """The first rank holds 1 + (p-1)/(p v) times the p micro batches of 1F1B (arXiv:2205.05198,
    section 4.2.3)."""
    timeline = simulate(PipelineSchedule("interleaved", ranks, chunks, 3 * ranks))
    first, *others = timeline.peak_activations
    assert first == ranks * (1 + Fraction(ranks - 1, ranks * chunks))
    assert all(other <= first for other in others)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_dualpipev_holds_the_same_on_all_ranks(ranks):
    timeline = simulate(PipelineSchedule("dualpipev", ranks, 2, 3 * ranks))
    assert set(timeline.peak_activations) == {ranks + Fraction(1, 2)}


def test_evaluation_holds_one_stage_input():
    timeline = simulate(PipelineSchedule("interleaved", 4, 2, 5, forward_only=True))
    assert set(timeline.peak_activations) == {Fraction(1, 2)}


def test_evaluation_pipelines():
    """Full groups of micro batches, and DualPipeV's two ways, keep every rank at work."""
    for name, chunks in SHAPES:
        for ranks in (2, 4):
            timeline = simulate(PipelineSchedule(name, ranks, chunks, 6 * ranks, True))
            lead = Fraction(timeline.schedule.stages if name == "dualpipev" else ranks, chunks)
            assert timeline.span <= 6 * ranks + lead


def test_recorded_orders():
    schedule = PipelineSchedule("1f1b", 2, 1, 4)
    orders = [schedule.actions(rank) for rank in range(2)]
    assert simulate_order(orders, schedule) == simulate(schedule)
    # All forwards first takes as long, but holds everything.
    gpipe = [sorted(order, key=lambda action: action.backward) for order in orders]
    timeline = simulate_order(gpipe, schedule)
    assert timeline.peak_activations == (4, 4)
    assert timeline.span == simulate(schedule).span
    orders[1].reverse()
    with pytest.raises(ValueError, match="rank 0 waits for ever: .*backward=True, stage=0"):
        simulate_order(orders, schedule)
