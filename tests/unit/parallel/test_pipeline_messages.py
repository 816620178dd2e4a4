"""Sends and receives of a pipeline: complete, in time, and free of deadlock."""

import pytest

from megatron.parallel.pipeline_messages import Exchange, Transfer, transfer_of, work_plan
from megatron.parallel.pipeline_schedules import Action, PipelineSchedule
from megatron.parallel.timeline import inputs

SHAPES = [("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("dualpipev", 2)]


class Blocked(Exception):
    """Nobody can go on."""


def rendezvous(schedule: PipelineSchedule, programs: list[list[Action | Exchange]]) -> None:
    """Runs programs whose exchanges block until every partner stands at its matching exchange.

    Raises:
        Blocked: some rank waits for ever.
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
                have[rank].add(action)
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
@pytest.mark.parametrize("forward_only", [False, True])
def test_nobody_waits_for_ever_in_rendezvous(schedules, name, chunks, forward_only):
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
