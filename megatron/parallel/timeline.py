"""A pipeline schedule in time: when each action runs, and which messages the ranks exchange when.

Times are exact fractions, so that "at the same time" means just that.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron.parallel.pipeline_schedules import INPUTS, WEIGHTS, Action, PipelineSchedule


@dataclass(frozen=True)
class Slot:
    """When an action runs on its rank."""

    rank: int
    action: Action
    start: Fraction
    end: Fraction


@dataclass(frozen=True)
class Timeline:
    """One step of a schedule in time; ``slots`` are all actions, rank after rank, each in order."""

    schedule: PipelineSchedule
    slots: tuple[Slot, ...]


def simulate(
    schedule: PipelineSchedule,
    forward_time: float | Fraction = 1.0,
    backward_time: float | Fraction = 2.0,
    transfer_time: float | Fraction = 0.0,
    weight_time: float | Fraction | None = None,
) -> Timeline:
    """Runs a schedule: every rank does its actions in order, each as soon as the rank is free and
    the action's input has arrived. Forward and backward times are those of one micro batch through
    all stages of a rank; during a transfer both ranks can work. The gradients of weights that come
    later take ``weight_time`` of the backward time, by default half."""
    orders = [schedule.actions(rank) for rank in range(schedule.ranks)]
    times = forward_time, backward_time, transfer_time, weight_time
    return simulate_order(orders, schedule, *times)


def simulate_order(
    orders: Sequence[Sequence[Action]],
    schedule: PipelineSchedule,
    forward_time: float | Fraction = 1.0,
    backward_time: float | Fraction = 2.0,
    transfer_time: float | Fraction = 0.0,
    weight_time: float | Fraction | None = None,
) -> Timeline:
    """:func:`simulate` for the orders in which the ranks actually did their actions. Raises
    ValueError if a rank would wait indefinitely; names the action and what it waits for."""
    backward, chunks = Fraction(backward_time), schedule.chunks
    weights = backward / 2 if weight_time is None else Fraction(weight_time)
    of_part = {"": backward / chunks, INPUTS: (backward - weights) / chunks}
    of_part[WEIGHTS] = weights / chunks
    transfer = Fraction(transfer_time)
    waiting = [deque(order) for order in orders]
    free = [Fraction(0) for _ in orders]
    done: dict[Action, Slot] = {}

    def missing(action: Action) -> list[Action]:
        return [needed for needed in inputs(schedule, action) if needed not in done]

    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(waiting):
            while queue and not missing(queue[0]):
                action = queue.popleft()
                made = [done[needed] for needed in inputs(schedule, action)]
                arrivals = [slot.end + (transfer if slot.rank != rank else 0) for slot in made]
                start = max([free[rank], *arrivals])
                takes = of_part[action.part] if action.backward else Fraction(forward_time) / chunks
                free[rank] = start + takes
                done[action.result] = Slot(rank, action, start, free[rank])
                moved = True
    for rank, queue in enumerate(waiting):
        if queue:
            raise ValueError(
                f"rank {rank} waits indefinitely: {queue[0]} needs {missing(queue[0])}"
            )
    return Timeline(schedule, tuple(done[action.result] for order in orders for action in order))


def inputs(schedule: PipelineSchedule, action: Action) -> list[Action]:
    """The :attr:`Action.result` of the passes that an action needs."""
    needs = []
    if action.part == WEIGHTS:
        needs.append(Action(True, action.stage, action.micro_batch))
    elif action.backward:
        needs.append(Action(False, action.stage, action.micro_batch))
        if action.stage + 1 < schedule.stages:
            needs.append(Action(True, action.stage + 1, action.micro_batch))
    elif action.stage > 0:
        needs.append(Action(False, action.stage - 1, action.micro_batch))
    return needs


@dataclass(frozen=True)
class Transfer:
    """A stage's output, or the gradient of its input, sent to another pipeline rank."""

    gradient: bool
    micro_batch: int
    from_stage: int
    to_stage: int
    source: int
    target: int


@dataclass(frozen=True)
class Exchange:
    """Transfers that a rank posts together, in the same order as its partners."""

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


def work_plan(schedule: PipelineSchedule, rank: int) -> list[Action | Exchange]:
    """Actions and communication of a rank in one step.

    Transfers that become ready at the same moment of the simulated step make up a round. Every rank
    posts its part of each round in the order of these moments: after its own actions that have
    ended by then, before all later ones. As all ranks keep the same order, there is no deadlock,
    even where a post blocks until its partners have posted.
    """
    slots = simulate(schedule).slots
    sends: dict[Fraction, list[Transfer]] = defaultdict(list)
    receives: dict[Fraction, list[Transfer]] = defaultdict(list)
    for slot in slots:
        transfer = transfer_of(schedule, slot.action)
        if transfer is not None and transfer.source == rank:
            sends[slot.end].append(transfer)
        if transfer is not None and transfer.target == rank:
            receives[slot.end].append(transfer)
    # Sorting keeps the order of what is equal: actions that end at a moment come before its round.
    timed: list[tuple[Fraction, Action | Exchange]] = [
        (slot.end, slot.action) for slot in slots if slot.rank == rank
    ]
    for moment in sends.keys() | receives.keys():
        timed.append((moment, Exchange(tuple(sends[moment]), tuple(receives[moment]))))
    return [entry for _, entry in sorted(timed, key=lambda entry: entry[0])]


def transfer_of(schedule: PipelineSchedule, action: Action) -> Transfer | None:
    """Return the path of an action's result to the next stage; None when that is on the same
    rank, or waits for nothing of it."""
    if action.part == WEIGHTS:
        return None
    target_stage = action.stage + (-1 if action.backward else 1)
    if not 0 <= target_stage < schedule.stages:
        return None
    source, target = schedule.rank_of(action.stage), schedule.rank_of(target_stage)
    if source == target:
        return None
    return Transfer(action.backward, action.micro_batch, action.stage, target_stage, source, target)
