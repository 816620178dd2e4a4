"""Who sends what to whom in a pipeline, and when."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction

from megatron.parallel.pipeline_schedules import Action, PipelineSchedule
from megatron.parallel.timeline import simulate


@dataclass(frozen=True)
class Transfer:
    """A stage's output, or the gradient of its input, on its way to another pipeline rank."""

    gradient: bool
    micro_batch: int
    from_stage: int
    to_stage: int
    source: int
    target: int


@dataclass(frozen=True)
class Exchange:
    """Transfers that a rank posts together, all in the order that its partners use too."""

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


def work_plan(schedule: PipelineSchedule, rank: int) -> list[Action | Exchange]:
    """What a rank does in one step, its communication included.

    Transfers that become ready at the same moment of the simulated step make up a round. Every
    rank posts its part of each round in the order of these moments: after its own actions that
    have ended by then, before all later ones. A send thus follows the action that makes it, and a
    receive comes before the action that needs it. As all ranks keep to one order of rounds, nobody
    waits for ever, even where a post blocks until its partners have posted.
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
    """What an action's result makes necessary; None when its next stage is on the same rank."""
    target_stage = action.stage + (-1 if action.backward else 1)
    if not 0 <= target_stage < schedule.stages:
        return None
    source, target = schedule.rank_of(action.stage), schedule.rank_of(target_stage)
    if source == target:
        return None
    return Transfer(action.backward, action.micro_batch, action.stage, target_stage, source, target)
