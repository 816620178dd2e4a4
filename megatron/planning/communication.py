"""Bytes that one rank sends in a step.

Ring algorithms move (n - 1) / n of a buffer for an all-gather or a reduce-scatter over n ranks, and
twice that for an all-reduce (Thakur, Rabenseifner and Gropp 2005, section 4).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config import ModelConfig
from megatron.config.layouts import Layout
from megatron.planning.parameters import local_widths


@dataclass(frozen=True)
class Communication:
    """Bytes sent by the rank that sends most, by what they are for."""

    tensor: float
    pipeline: float
    data: float


def ring(ranks: int) -> float:
    """What a rank sends in an all-gather or reduce-scatter, as a share of the whole buffer."""
    return (ranks - 1) / ranks


def tensor_bytes_per_block(model: ModelConfig, layout: Layout, micro_batch: int) -> float:
    """Bytes that a block sends over tensor-parallel ranks for one micro batch.

    Two all-reduces of the hidden states forward and two backward (Shoeybi et al. 2019,
    arXiv:1909.08053, section 3). Sequence parallelism makes each an all-gather and a
    reduce-scatter, as many bytes (Korthikanti et al. 2022, section 4.2.2), and gathers the inputs
    of the two cut layers a third time for the gradients of their weights. Full recomputation
    sends the forward's part again.
    """
    passes = 4 + 2 * (layout.recompute in ("uniform", "block"))
    gathers = 2 * passes + 2 * layout.sequence
    # Products are in 16 bits under autocast too, which is how those run at stage 0.
    size = 0.5 if layout.precision != "fp32" and layout.zero == 0 else 1.0
    return gathers * ring(layout.tensor) * size * hidden_bytes(model, layout, micro_batch)


def tensor_bytes_at_ends(model: ModelConfig, layout: Layout, micro_batch: int) -> float:
    """The same of the token table's lookup or of the output head: an all-reduce each."""
    return 2 * ring(layout.tensor) * hidden_bytes(model, layout, micro_batch)


def hidden_bytes(model: ModelConfig, layout: Layout, micro_batch: int) -> float:
    """Hidden states of a micro batch, whole."""
    size = 4 if layout.precision == "fp32" or layout.zero == 0 else 2
    return float(size * micro_batch * model.seq_length * model.hidden_size)


def pipeline_bytes(
    model: ModelConfig, layout: Layout, micro_batch: int, micro_batches: int
) -> float:
    """Bytes that a rank of a pipeline sends to its neighbours: of every stage the hidden states
    forward and their gradients backward, a share of the sequence with sequence parallelism."""
    if layout.pipeline == 1:
        return 0.0
    split = layout.tensor if layout.sequence else 1
    return 2 * micro_batches * layout.chunks * hidden_bytes(model, layout, micro_batch) / split


def gradient_size(layout: Layout) -> int:
    """Bytes of an element of the gradients that travel."""
    half = layout.precision != "fp32" and layout.zero > 0
    return 2 if half and not layout.grads_in_fp32 else 4


def tied_bytes(model: ModelConfig, layout: Layout) -> float:
    """Bytes of a rank's gradients of the token table, where the pipeline's first and last rank each
    hold a copy of it, whose gradients they sum; else 0."""
    # DualPipeV has the first and the last stage on one rank.
    if not model.embedding.tied or layout.pipeline == 1 or layout.schedule == "dualpipev":
        return 0.0
    table = local_widths(model, layout.tensor).vocab * model.hidden_size
    return float(gradient_size(layout) * table)


def data_bytes(layout: Layout, parameters: int, micro_batches: int) -> float:
    """Bytes that gradients and parameters take over data-parallel ranks.

    Rajbhandari et al. 2020 (arXiv:1910.02054, section 7): an all-reduce of the gradients without
    ZeRO; at stage 1 reduce-scatter of gradients and all-gather of weights, as much; at stage 3
    weights are gathered for forward and backward and gradients scattered, half as much again.
    Stages 2 and 3 cannot keep whole gradients, so they reduce them after every micro batch.
    """
    weight = 2 if layout.precision != "fp32" and layout.zero > 0 else 4
    gradient = gradient_size(layout)
    share = ring(layout.data) * parameters
    return (
        share
        * {
            0: 2 * gradient,
            1: gradient + weight,
            2: micro_batches * gradient + weight,
            3: micro_batches * (2 * weight + gradient),
        }[layout.zero]
    )
