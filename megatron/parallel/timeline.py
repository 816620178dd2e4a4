"""A pipeline schedule in time: when each action runs, and what that costs.

Times are exact fractions, so that "at the same time" means just that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron.parallel.pipeline_schedules import Action, PipelineSchedule


@dataclass(frozen=True)
class Slot:
    """An action on its rank, and from when to when it runs."""

    rank: int
    action: Action
    start: Fraction
    end: Fraction


@dataclass(frozen=True)
class Timeline:
    """One step of a pipeline in time.

    Attributes:
        schedule: whose step this is.
        slots: all actions, rank after rank, each rank's in their order.
    """

    schedule: PipelineSchedule
    slots: tuple[Slot, ...]

    @property
    def span(self) -> Fraction:
        """Time from the first action to the end of the last."""
        return max(slot.end for slot in self.slots)

    @property
    def _busy(self) -> Fraction:
        return sum((slot.end - slot.start for slot in self.slots), Fraction(0))

    @property
    def bubble_share(self) -> Fraction:
        """Share of the ranks' time in which they wait."""
        return 1 - self._busy / (self.schedule.ranks * self.span)

    @property
    def bubble_ratio(self) -> Fraction:
        """Waiting time over working time, the figure of Narayanan et al. 2021."""
        return self.schedule.ranks * self.span / self._busy - 1

    @property
    def peak_activations(self) -> tuple[Fraction, ...]:
        """For each rank the most stage inputs it holds at once for backwards to come, in units of
        one micro batch through the rank's whole share (an input of one chunk is 1/chunks)."""
        peaks = []
        for rank in range(self.schedule.ranks):
            held = peak = 0
            for slot in self.slots:
                if slot.rank == rank:
                    # In evaluation an input is let go when its forward is done.
                    peak = max(peak, held + (not slot.action.backward))
                    held += 0 if self.schedule.forward_only else 1 - 2 * slot.action.backward
            peaks.append(Fraction(peak, self.schedule.chunks))
        return tuple(peaks)


def simulate(
    schedule: PipelineSchedule,
    forward_time: float | Fraction = 1.0,
    backward_time: float | Fraction = 2.0,
    transfer_time: float | Fraction = 0.0,
) -> Timeline:
    """Runs a schedule: every rank does its actions in order, each as soon as the rank is free and
    the action's input is there.

    Args:
        schedule: the schedule.
        forward_time: one micro batch forward through all stages of one rank.
        backward_time: the same backward.
        transfer_time: from one rank to another, during which both can work.
    """
    orders = [schedule.actions(rank) for rank in range(schedule.ranks)]
    return simulate_order(orders, schedule, forward_time, backward_time, transfer_time)


def simulate_order(
    orders: Sequence[Sequence[Action]],
    schedule: PipelineSchedule,
    forward_time: float | Fraction = 1.0,
    backward_time: float | Fraction = 2.0,
    transfer_time: float | Fraction = 0.0,
) -> Timeline:
    """Like :func:`simulate`, for the order in which each rank really did its actions.

    Raises:
        ValueError: a rank would wait for ever; the message names the action and what it waits for.
    """
    duration = {
        False: Fraction(forward_time) / schedule.chunks,
        True: Fraction(backward_time) / schedule.chunks,
    }
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
                free[rank] = start + duration[action.backward]
                done[action] = Slot(rank, action, start, free[rank])
                moved = True
    for rank, queue in enumerate(waiting):
        if queue:
            raise ValueError(f"rank {rank} waits for ever: {queue[0]} needs {missing(queue[0])}")
    return Timeline(schedule, tuple(done[action] for order in orders for action in order))


def theory(name: str, ranks: int, chunks: int, micro_batches: int) -> Fraction | None:
    """Waiting time over working time by the formula of Narayanan et al. 2021 (arXiv:2104.04473,
    sections 2.2.1 and 2.2.2), (p - 1) / (v m), for free transfers; None for dualpipev.

    DualPipeV's published bubble assumes overlapped forwards and backwards and weight gradients
    that wait, so it says nothing about a schedule that does neither.
    """
    if name == "dualpipev":
        return None
    return Fraction(ranks - 1, chunks * micro_batches)


def inputs(schedule: PipelineSchedule, action: Action) -> list[Action]:
    """The actions whose results an action needs."""
    needs = []
    if action.backward:
        needs.append(Action(False, action.stage, action.micro_batch))
        if action.stage + 1 < schedule.stages:
            needs.append(Action(True, action.stage + 1, action.micro_batch))
    elif action.stage > 0:
        needs.append(Action(False, action.stage - 1, action.micro_batch))
    return needs
