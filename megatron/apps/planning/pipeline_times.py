"""Costs of a pipeline schedule over time: waiting time of ranks, and activations kept meanwhile."""

from __future__ import annotations

from fractions import Fraction

from megatron.config.layouts import BOTH_WAYS
from megatron.parallel.pipeline_schedules import INPUTS
from megatron.parallel.timeline import Timeline


def step_length(timeline: Timeline) -> Fraction:
    """The length of a step."""
    return max(slot.end for slot in timeline.slots)


def _busy(timeline: Timeline) -> Fraction:
    return sum((slot.end - slot.start for slot in timeline.slots), Fraction(0))


def waiting_share(timeline: Timeline) -> Fraction:
    """Waiting time of all ranks as a share of total time."""
    return 1 - _busy(timeline) / (timeline.schedule.ranks * step_length(timeline))


def waiting_ratio(timeline: Timeline) -> Fraction:
    """Waiting time over working time, the figure of Narayanan et al. 2021."""
    return timeline.schedule.ranks * step_length(timeline) / _busy(timeline) - 1


def peak_activations(timeline: Timeline) -> tuple[Fraction, ...]:
    """For each rank the most stage inputs kept at once for later backwards, in units of one micro
    batch through the rank's whole share (an input of one chunk is 1/chunks). What weight gradients
    that come later need, inputs and output gradients of linear layers, counts as much."""
    schedule, peaks = timeline.schedule, []
    for rank in range(schedule.ranks):
        kept = peak = 0
        for slot in timeline.slots:
            if slot.rank == rank:
                # In evaluation an input is let go when its forward is done.
                peak = max(peak, kept + (not slot.action.backward))
                if slot.action.part != INPUTS and not schedule.forward_only:
                    kept += 1 - 2 * slot.action.backward
        peaks.append(Fraction(peak, schedule.chunks))
    return tuple(peaks)


def theory(
    name: str,
    ranks: int,
    chunks: int,
    micro_batches: int,
    times: tuple[Fraction, Fraction, Fraction] = (Fraction(1), Fraction(1), Fraction(1)),
) -> Fraction | None:
    """Waiting time over working time by the formula of Narayanan et al. 2021 (arXiv:2104.04473,
    sections 2.2.1 and 2.2.2), (p - 1) / (v m), for free transfers. With ``times`` F of a forward, B
    and W of a backward for inputs and for weights ZB-H1 waits (p - 1) (F + B - W) (Qi et al. 2024,
    arXiv:2401.10241, section 2.3), or (p - 1) F or B where that is longer, from p micro batches on;
    None for fewer. None for both DualPipeV, whose published bubble assumes overlapped forwards and
    backwards, which these schedules do not have."""
    if name in BOTH_WAYS or (name == "zbh1" and micro_batches < ranks):
        return None
    forward, backward, weights = times
    ratio = Fraction(ranks - 1, chunks * micro_batches)
    if name != "zbh1":
        return ratio
    return ratio * max(forward, backward, forward + backward - weights) / sum(times)
