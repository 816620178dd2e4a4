"""Time of an optimizer step: computing, waiting for others, sending.

A step takes FLOPs / (utilisation x peak) + bytes / bandwidth for what is not hidden, both of the
slowest rank, and the pipeline's bubble. The optimizer's own time, data loading, logging and
checkpoints are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config import ModelConfig
from megatron.config.layouts import Layout
from megatron.planning.communication import (
    Communication,
    data_bytes,
    pipeline_bytes,
    ring,
    tensor_bytes_at_ends,
    tensor_bytes_per_block,
    tied_bytes,
)
from megatron.planning.hardware import Hardware
from megatron.planning.parameters import RankShare, local_widths


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by what they go to."""

    compute: float
    tensor: float
    pipeline: float
    data: float
    bubble: float

    @property
    def total(self) -> float:
        """The whole step."""
        return self.compute + self.tensor + self.pipeline + self.data + self.bubble

    @property
    def bubble_share(self) -> float:
        """Share of the step in which a rank of the pipeline waits for the others."""
        return self.bubble / self.total


def rank_flops(model: ModelConfig, layout: Layout, micro_batch: int, share: RankShare) -> float:
    """FLOPs of one rank for one micro batch, forward and backward, what is recomputed included.

    Matrix products only, two operations per multiply-add, attention over all pairs, as in
    Narayanan et al. 2021 (arXiv:2104.04473, section 5.1) and in Korthikanti et al. 2022 (section 6
    and appendix A), whose hardware FLOPs these are.
    """
    width, hidden = local_widths(model, layout.tensor), model.hidden_size
    attention = 4 * width.query * model.seq_length
    matrices = (
        2 * hidden * (2 * width.query + 2 * width.kv + (3 if model.mlp.gated else 2) * width.ffn)
    )
    again = {None: 0, "selective": attention}.get(layout.recompute, matrices + attention)
    block = 3 * (matrices + attention) + again
    head = 3 * 2 * hidden * width.vocab if share.last else 0
    return micro_batch * model.seq_length * (sum(share.blocks) * block + head)


def bubble_ratio(layout: Layout, micro_batches: int) -> float:
    """Waiting time over working time of a pipeline.

    (p - 1) / (v m) by Narayanan et al. 2021 (section 2.2). For dualpipev what this project's
    schedule comes to, where a backward computes the gradients of inputs and weights together:
    ((p - 1) B - F / 2) / (m (F + B)), a backward B taking two or more forwards F.
    """
    p, m = layout.pipeline, micro_batches
    if p == 1:
        return 0.0
    if layout.schedule == "dualpipev":
        backward = 3 if layout.recompute in ("uniform", "block") else 2
        return ((p - 1) * backward - 0.5) / (m * (1 + backward))
    return (p - 1) / (layout.chunks * m)


def step_time(
    model: ModelConfig,
    layout: Layout,
    micro_batch: int,
    micro_batches: int,
    shares: list[RankShare],
    hardware: Hardware,
) -> tuple[StepTime, Communication]:
    """The time of a step, and the bytes sent by the rank that sends most.

    Args:
        model: the complete model, its vocabulary padded for the layout.
        layout: the layout.
        micro_batch: samples of a micro batch.
        micro_batches: micro batches of a step.
        shares: what each rank of the pipeline holds.
        hardware: what machines do.
    """
    per_block = tensor_bytes_per_block(model, layout, micro_batch)
    at_end = tensor_bytes_at_ends(model, layout, micro_batch)
    t, d, p = layout.tensor, layout.data, layout.pipeline
    working = []
    for share in shares:
        flops = micro_batches * rank_flops(model, layout, micro_batch, share)
        sent = micro_batches * (sum(share.blocks) * per_block + (share.first + share.last) * at_end)
        exposed = sent / hardware.ring_bandwidth(t, 1) * (1 - hardware.tensor_overlap)
        working.append((flops / hardware.flops + exposed, exposed, sent))
    busy, exposed, sent = max(working)
    held = max(share.parameters for share in shares)
    stages = pipeline_bytes(model, layout, micro_batch, micro_batches)
    # The copies of a tied table are averaged over replicas by themselves, then summed: all-reduces
    # at the end of the step, which nothing hides.
    tied = tied_bytes(model, layout)
    copies = 2 * ring(2) * tied
    volume = Communication(
        sent,
        stages + copies,
        data_bytes(layout, held, micro_batches) + 2 * ring(d) * tied,
    )
    hidden = hardware.data_overlap if layout.zero == 3 else 0.0
    return (
        StepTime(
            compute=busy - exposed,
            tensor=exposed,
            pipeline=(stages * (1 - hardware.pipeline_overlap) + copies)
            / hardware.link_bandwidth(p, t * d),
            data=volume.data / hardware.ring_bandwidth(d, t) * (1 - hidden),
            bubble=busy * bubble_ratio(layout, micro_batches),
        ),
        volume,
    )
