"""Costs of a pipeline schedule over time: the ranks' idle time, and the stored activations."""

from __future__ import annotations

from fractions import Fraction

from megatron.config.layouts import BOTH_WAYS
from megatron.parallel.pipeline_schedules import INPUTS
from megatron.parallel.timeline import Timeline


def step_length(timeline: Timeline) -> Fraction:
    """Return the duration of a step."""
    return max(slot.end for slot in timeline.slots)


def _busy(timeline: Timeline) -> Fraction:
    return sum((slot.end - slot.start for slot in timeline.slots), Fraction(0))


def waiting_share(timeline: Timeline) -> Fraction:
    """Return the idle time of all ranks as a fraction of their total time."""
    return 1 - _busy(timeline) / (timeline.schedule.ranks * step_length(timeline))


def waiting_ratio(timeline: Timeline) -> Fraction:
    """Return idle time divided by busy time, the bubble fraction of Narayanan et al. 2021."""
    return timeline.schedule.ranks * step_length(timeline) / _busy(timeline) - 1


def peak_activations(timeline: Timeline) -> tuple[Fraction, ...]:
    """Return, for each rank, the maximum number of stage inputs kept at once for later backward
    passes. The unit is one micro batch through all chunks of the rank, so an input of one chunk is
    1/chunks. An input and output gradient kept for later weight gradients together count as one."""
    schedule, peaks = timeline.schedule, []
    for rank in range(schedule.ranks):
        kept = peak = 0
        for slot in timeline.slots:
            if slot.rank == rank:
                # In evaluation, an input is freed when its forward pass is done.
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
    """Return idle time divided by busy time by a published formula, with free communication.

    For 1F1B and interleaved schedules it is (p - 1) / (v m) with p ranks, v chunks and m micro
    batches (Narayanan et al. 2021, arXiv:2104.04473, sections 2.2.1 and 2.2.2). ``times`` are F of
    a forward pass, B of input gradients and W of weight gradients. With at least p micro batches, a
    rank of ZB-H1 waits (p - 1) (F + B - W) (Qi et al. 2024, arXiv:2401.10241, section 2.3), or (p -
    1) F or (p - 1) B if that is longer. Return None for ZB-H1 with fewer micro batches, and for
    DualPipeV, whose published bubble assumes that forward and backward passes overlap. In this
    project they do not."""
    if name in BOTH_WAYS or (name == "zbh1" and micro_batches < ranks):
        return None
    forward, backward, weights = times
    ratio = Fraction(ranks - 1, chunks * micro_batches)
    if name != "zbh1":
        return ratio
    return ratio * max(forward, backward, forward + backward - weights) / sum(times)
