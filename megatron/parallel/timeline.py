"""Pipeline schedule over time: when each action runs, and when ranks exchange which messages. Times
are exact fractions, so that simultaneous events compare as equal.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron.parallel.pipeline_schedules import INPUTS, WEIGHTS, Action, PipelineSchedule


@dataclass(frozen=True)
class Slot:
    """An action with the rank on which it runs, and its start and end time."""

    rank: int
    action: Action
    start: Fraction
    end: Fraction


@dataclass(frozen=True)
class Timeline:
    """One step of a schedule over time. ``slots`` lists each rank's actions in order, by rank."""

    schedule: PipelineSchedule
    slots: tuple[Slot, ...]


def simulate(
    schedule: PipelineSchedule,
    forward_time: float | Fraction = 1.0,
    backward_time: float | Fraction = 2.0,
    transfer_time: float | Fraction = 0.0,
    weight_time: float | Fraction | None = None,
    orders: Sequence[Sequence[Action]] | None = None,
) -> Timeline:
    """Simulate a schedule. Every rank runs its actions in order, each as soon as the rank is free
    and the action's input has arrived. Forward and backward times are those of one micro batch
    through all stages of a rank. During a transfer, both ranks can compute. Weight gradients that
    are computed later take ``weight_time`` out of the backward time, by default half. ``orders``
    replace the schedule's orders, for example with those in which the ranks actually ran. Raises
    ValueError, with the action and its missing input, if a rank would wait indefinitely."""
    if orders is None:
        orders = [schedule.actions(rank) for rank in range(schedule.ranks)]
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
    """Return the :attr:`Action.result` of each pass whose output an action needs."""
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
    """Output of a stage, or gradient of a stage's input, that is sent to another pipeline rank."""

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
    """Return a rank's actions and exchanges in one step, in order.

    Transfers that become ready at the same time in the simulation form a round. Every rank posts
    its share of each round in the order of these times: after its own actions that have ended by
    then, before all later ones. As all ranks use the same order, there is no deadlock, even if a
    post blocks until its partners have posted.
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
    # Sorting is stable, so actions that end at this time come before its round.
    timed: list[tuple[Fraction, Action | Exchange]] = [
        (slot.end, slot.action) for slot in slots if slot.rank == rank
    ]
    for moment in sends.keys() | receives.keys():
        timed.append((moment, Exchange(tuple(sends[moment]), tuple(receives[moment]))))
    return [entry for _, entry in sorted(timed, key=lambda entry: entry[0])]


def transfer_of(schedule: PipelineSchedule, action: Action) -> Transfer | None:
    """Return the transfer of an action's result to the next stage. None if there is no next stage,
    if it is on the same rank, or if it does not need the result."""
    if action.part == WEIGHTS:
        return None
    target_stage = action.stage + (-1 if action.backward else 1)
    if not 0 <= target_stage < schedule.stages:
        return None
    source, target = schedule.rank_of(action.stage), schedule.rank_of(target_stage)
    if source == target:
        return None
    return Transfer(action.backward, action.micro_batch, action.stage, target_stage, source, target)
