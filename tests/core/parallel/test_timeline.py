"""Schedules in time against the formulas of their papers; their sends and receives: complete, in
time, and free of deadlock."""

from fractions import Fraction

import pytest
from samples import sampled

from megatron.apps.planning.pipeline_times import (
    peak_activations,
    step_length,
    theory,
    waiting_ratio,
    waiting_share,
)
from megatron.parallel.pipeline_schedules import INPUTS, WEIGHTS, Action, PipelineSchedule
from megatron.parallel.timeline import Exchange, Transfer, inputs, simulate, transfer_of, work_plan

SHAPES = [
    ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("dualpipev", 2), ("zbh1", 1),
    ("dualpipev_zb", 2),
]  # fmt: skip


@pytest.mark.parametrize("name, chunks", SHAPES)
@pytest.mark.parametrize("forward_only", [False, True])
def test_every_rule_of_a_timeline_holds(schedules, name, chunks, forward_only):
    for schedule in schedules(name, chunks, forward_only):
        timeline = simulate(schedule, 1.0, 1.5, transfer_time=0.25, weight_time=0.5)
        slots = {slot.action.result: slot for slot in timeline.slots}
        directions = 1 if forward_only else 2
        passes = [action for action in slots if action.part != WEIGHTS]
        assert len(passes) == directions * schedule.stages * schedule.micro_batches
        halves = {"": 3, INPUTS: 2, WEIGHTS: 1}
        for slot in slots.values():
            action = slot.action
            assert slot.rank == schedule.rank_of(action.stage)
            takes = Fraction(halves[action.part] if action.backward else 2, 2 * chunks)
            assert slot.end - slot.start == takes
            moments = [Fraction(0)]
            moments += [
                slots[needed].end + Fraction(slots[needed].rank != slot.rank, 4)
                for needed in inputs(schedule, action)
            ]
            own = schedule.actions(slot.rank)
            place = own.index(action)
            moments += [slots[own[place - 1].result].end] if place else []
            assert slot.start == max(moments)


@pytest.mark.parametrize("times", [(1, 2), (1, 1), (0.3, 0.7), (2, 1)])
@pytest.mark.parametrize("name, chunks", SHAPES[:3])
def test_bubble_against_narayanan(schedules, name, chunks, times):
    for schedule in schedules(name, chunks):
        timeline = simulate(schedule, *times)
        ranks, micro_batches = schedule.ranks, schedule.micro_batches
        assert waiting_ratio(timeline) == theory(name, ranks, chunks, micro_batches)
        ideal = micro_batches * (Fraction(times[0]) + Fraction(times[1]))
        assert waiting_share(timeline) == 1 - ideal / step_length(timeline)


def test_bubble_figures():
    """Interleaving divides the bubble by the number of chunks; DualPipeV lies between."""
    spans = {
        (name, chunks): step_length(simulate(PipelineSchedule(name, 4, chunks, 8)))
        for name, chunks in SHAPES
    }
    assert spans == {
        ("1f1b", 1): 33,
        ("interleaved", 2): Fraction(57, 2),
        ("interleaved", 3): 27,
        ("dualpipev", 2): Fraction(59, 2),
        ("zbh1", 1): 27,
        ("dualpipev_zb", 2): Fraction(51, 2),
    }
    assert theory("dualpipev", 4, 2, 8) is None is theory("dualpipev_zb", 4, 2, 8)


@pytest.mark.parametrize(
    "times", [(1, 1, 1), (1, 2, 1), (0.9, 1.1, 1), (1, 1, 3), (2, 1, 1.5), (1, 1, 0)]
)
def test_bubble_against_qi(schedules, times):
    """(p - 1) (F + B - W) of 1F1B's (p - 1) (F + B + W), and F or B with a long W."""
    for schedule in schedules("zbh1", 1):
        ranks, count = schedule.ranks, schedule.micro_batches
        forward, backward, weights = exact = tuple(Fraction(str(time)) for time in times)
        timeline = simulate(schedule, forward, backward + weights, 0, weights)
        if count < ranks:
            assert theory("zbh1", ranks, 1, count, exact) is None
            continue
        assert waiting_ratio(timeline) == theory("zbh1", ranks, 1, count, exact)
        assert set(peak_activations(timeline)) == {ranks}
        if forward >= weights <= backward:
            waited = step_length(timeline) - count * sum(exact)
            assert waited == (ranks - 1) * (forward + backward - weights)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_dualpipev_zb_bubble_as_counted(ranks):
    """(p - 1) F / 2 with forwards, inputs and weights of equal times; docs/guides/planning.md."""
    for count in (2 * ranks, 2 * ranks + 1, 5 * ranks):
        timeline = simulate(PipelineSchedule("dualpipev_zb", ranks, 2, count))
        assert waiting_ratio(timeline) == Fraction(ranks - 1, 6 * count)
        assert set(peak_activations(timeline)) == {ranks + Fraction(1, 2)}


def test_dualpipev_bubble_as_counted(schedules):
    """No published formula fits (see theory); docs/guides/planning.md gives this one."""
    for schedule in schedules("dualpipev", 2):
        ranks = schedule.ranks
        expected = Fraction(4 * ranks - 5, 6 * schedule.micro_batches) if ranks > 1 else 0
        assert waiting_ratio(simulate(schedule)) == expected


def test_1f1b_holds_a_micro_batch_per_rank_that_follows(schedules):
    for schedule in schedules("1f1b", 1):
        ranks, micro_batches = schedule.ranks, schedule.micro_batches
        expected = [min(ranks - rank, micro_batches) for rank in range(ranks)]
        assert list(peak_activations(simulate(schedule))) == expected


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_activations_of_interleaved_against_korthikanti(ranks, chunks):
    """The first rank holds 1 + (p-1)/(p v) times the p micro batches of 1F1B (arXiv:2205.05198,
    section 4.2.3)."""
    timeline = simulate(PipelineSchedule("interleaved", ranks, chunks, 3 * ranks))
    first, *others = peak_activations(timeline)
    assert first == ranks * (1 + Fraction(ranks - 1, ranks * chunks))
    assert all(other <= first for other in others)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_dualpipev_holds_the_same_on_all_ranks(ranks):
    timeline = simulate(PipelineSchedule("dualpipev", ranks, 2, 3 * ranks))
    assert set(peak_activations(timeline)) == {ranks + Fraction(1, 2)}


def test_evaluation_holds_one_stage_input():
    timeline = simulate(PipelineSchedule("interleaved", 4, 2, 5, forward_only=True))
    assert set(peak_activations(timeline)) == {Fraction(1, 2)}


def test_evaluation_pipelines():
    """Full groups of micro batches, and DualPipeV's two ways, keep every rank at work."""
    for name, chunks in SHAPES:
        for ranks in (2, 4):
            timeline = simulate(PipelineSchedule(name, ranks, chunks, 6 * ranks, True))
            both_ways = name.startswith("dualpipev")
            lead = Fraction(timeline.schedule.stages if both_ways else ranks, chunks)
            assert step_length(timeline) <= 6 * ranks + lead


def test_recorded_orders():
    schedule = PipelineSchedule("1f1b", 2, 1, 4)
    orders = [schedule.actions(rank) for rank in range(2)]
    assert simulate(schedule, orders=orders) == simulate(schedule)
    # All forwards first takes as long, but holds everything.
    gpipe = [sorted(order, key=lambda action: action.backward) for order in orders]
    timeline = simulate(schedule, orders=gpipe)
    assert peak_activations(timeline) == (4, 4)
    assert step_length(timeline) == step_length(simulate(schedule))
    orders[1].reverse()
    with pytest.raises(ValueError, match="rank 0 waits indefinitely: .*backward=True, stage=0"):
        simulate(schedule, orders=orders)


class Blocked(Exception):
    """No rank can continue."""


def rendezvous(schedule: PipelineSchedule, programs: list[list[Action | Exchange]]) -> None:
    """Runs programs whose exchanges block until every partner stands at its matching exchange.

    Raises:
        Blocked: some rank waits indefinitely.
        AssertionError: an action's input is not there, or a transfer goes astray.
    """
    at = [0] * schedule.ranks
    have: list[set[Action]] = [set() for _ in programs]  # results that are on a rank
    sent: list[Transfer] = []

    def current(rank: int) -> Action | Exchange | None:
        return programs[rank][at[rank]] if at[rank] < len(programs[rank]) else None

    def group(rank: int) -> set[int] | None:
        """Ranks that must post together with this one; None while one of them is elsewhere."""
        found, todo = {rank}, [rank]
        while todo:
            here = todo.pop()
            exchange = current(here)
            assert isinstance(exchange, Exchange)
            for transfer in exchange.sends + exchange.receives:
                (other,) = {transfer.source, transfer.target} - {here}
                theirs = current(other)
                if not isinstance(theirs, Exchange):
                    return None
                if transfer not in (theirs.receives if transfer.source == here else theirs.sends):
                    return None
                if other not in found:
                    found.add(other)
                    todo.append(other)
        return found

    while any(current(rank) is not None for rank in range(schedule.ranks)):
        moved = False
        for rank in range(schedule.ranks):
            while isinstance(action := current(rank), Action):
                missing = [need for need in inputs(schedule, action) if need not in have[rank]]
                assert not missing, (rank, action, missing)
                have[rank].add(action.result)
                at[rank] += 1
                moved = True
            if current(rank) is None or (partners := group(rank)) is None:
                continue
            for partner in partners:
                exchange = current(partner)
                assert isinstance(exchange, Exchange) and (exchange.sends or exchange.receives)
                for transfer in exchange.sends:
                    made = Action(transfer.gradient, transfer.from_stage, transfer.micro_batch)
                    assert transfer.source == partner != transfer.target
                    assert made in have[partner], (partner, transfer)
                    have[transfer.target].add(made)
                    sent.append(transfer)
            for partner in partners:
                at[partner] += 1
            moved = True
        if not moved:
            raise Blocked([current(rank) for rank in range(schedule.ranks)])
    expected = [
        transfer
        for rank in range(schedule.ranks)
        for action in schedule.actions(rank)
        if (transfer := transfer_of(schedule, action)) is not None
    ]
    assert len(sent) == len(set(sent)) and set(sent) == set(expected)


def programs_of(schedule: PipelineSchedule) -> list[list[Action | Exchange]]:
    return [work_plan(schedule, rank) for rank in range(schedule.ranks)]


@pytest.mark.parametrize("name, chunks", [*SHAPES, ("interleaved", 4)])
@pytest.mark.parametrize("forward_only", sampled([False, True], lambda only: not only))
def test_nobody_waits_indefinitely_in_rendezvous(schedules, name, chunks, forward_only):
    for schedule in schedules(name, chunks, forward_only):
        programs = programs_of(schedule)
        rendezvous(schedule, programs)
        for rank, entries in enumerate(programs):
            assert [e for e in entries if isinstance(e, Action)] == schedule.actions(rank)


@pytest.mark.parametrize("name, chunks", SHAPES)
@pytest.mark.parametrize("forward_only", [False, True])
def test_partners_list_the_same_transfers_in_the_same_order(schedules, name, chunks, forward_only):
    for schedule in schedules(name, chunks, forward_only):
        exchanges = [[e for e in p if isinstance(e, Exchange)] for p in programs_of(schedule)]
        for exchange in (e for ours in exchanges for e in ours):
            sources = [t.source for t in exchange.receives]
            assert sources == sorted(set(sources)) and len(exchange.sends) <= 1
        received: list[Transfer] = []
        for source, ours in enumerate(exchanges):
            for target, theirs in enumerate(exchanges):
                sends = [t for e in ours for t in e.sends if t.target == target]
                receives = [t for e in theirs for t in e.receives if t.source == source]
                assert sends == receives
                assert all(t.source == source and t.target == target for t in sends)
                received += receives
        assert len(received) == len(set(received))
        if schedule.ranks == 1:
            assert not received


def test_program_spelled_out():
    schedule = PipelineSchedule("1f1b", 2, 1, 2)
    activation = [Transfer(False, m, 0, 1, 0, 1) for m in range(2)]
    gradient = [Transfer(True, m, 1, 0, 1, 0) for m in range(2)]
    forward = [[Action(False, s, m) for m in range(2)] for s in range(2)]
    backward = [[Action(True, s, m) for m in range(2)] for s in range(2)]
    assert work_plan(schedule, 0) == [
        forward[0][0], Exchange((activation[0],), ()),
        forward[0][1], Exchange((activation[1],), ()),
        Exchange((), (gradient[0],)), backward[0][0],
        Exchange((), (gradient[1],)), backward[0][1],
    ]  # fmt: skip
    assert work_plan(schedule, 1) == [
        Exchange((), (activation[0],)), forward[1][0],
        Exchange((), (activation[1],)), backward[1][0], Exchange((gradient[0],), ()),
        forward[1][1], backward[1][1], Exchange((gradient[1],), ()),
    ]  # fmt: skip


def test_the_v_turns_without_a_message():
    schedule = PipelineSchedule("dualpipev", 2, 2, 4)
    assert transfer_of(schedule, Action(False, 1, 0)) is None
    assert transfer_of(schedule, Action(False, 2, 0)) == Transfer(False, 0, 2, 3, 1, 0)
    assert transfer_of(schedule, Action(True, 0, 0)) is None


def test_the_executor_finds_faults():
    schedule = PipelineSchedule("interleaved", 4, 2, 8)
    crossed = programs_of(schedule)
    first, second, *_ = (i for i, e in enumerate(crossed[1]) if isinstance(e, Exchange))
    crossed[1][first], crossed[1][second] = crossed[1][second], crossed[1][first]
    with pytest.raises((Blocked, AssertionError)):
        rendezvous(schedule, crossed)
    lost = programs_of(schedule)
    for entries in (lost[0], lost[1]):
        place = next(i for i, e in enumerate(entries) if isinstance(e, Exchange))
        del entries[place]
    with pytest.raises((Blocked, AssertionError)):
        rendezvous(schedule, lost)
