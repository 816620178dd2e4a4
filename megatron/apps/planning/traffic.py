"""Number of collectives, and bytes that a rank's layers send in a step, for each axis of the mesh.

Only calls whose size grows with the model or the micro batches are counted, not the few numbers
that a step compares and logs. The data axis is for ZeRO 0.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch

from megatron.apps.planning.parameters import RankShare
from megatron.apps.planning.step_time import (
    data_bytes,
    keeps_outputs,
    messages,
    pipeline_bytes,
    ring,
    tensor_bytes_at_ends,
    tensor_bytes_per_block,
    tied_bytes,
)
from megatron.config import ModelConfig
from megatron.config.layouts import Layout
from megatron.families import spec_of
from megatron.features.context.costs import attention_bytes, heads_of
from megatron.parallel.mesh import Group
from megatron.parallel.tensor_parallel import TensorParallel

LOSS_ROWS = {"compiled": 3, "eager": 2}
"""Numbers per token that tensor-parallel ranks exchange for a loss: the largest logit, the sum of
exponentials and the label's logit. The eager loss combines the first two."""


class Sent(NamedTuple):
    """A rank's collective calls in a step, and the bytes that it sends in them."""

    calls: int
    bytes: float

    def __add__(self, other: object) -> Sent:
        assert isinstance(other, Sent)
        return Sent(self.calls + other.calls, self.bytes + other.bytes)

    def times(self, count: int) -> Sent:
        """Return the calls and bytes of ``count`` repetitions."""
        return Sent(self.calls * count, self.bytes * count)


NOTHING = Sent(0, 0.0)


@lru_cache(maxsize=64)
def summed_parameters(model: ModelConfig, tensor: int, sequence: bool) -> tuple[int, ...]:
    """Return each layer's number of parameters whose gradients are summed over ``tensor`` ranks."""
    tp = TensorParallel(Group(tuple(range(tensor))), sequence)
    with torch.device("meta"):
        return tuple(
            sum(p.numel() for p in layer.build().parameters() if getattr(p, "summed", False))
            for layer in spec_of(model).layers(tp)
        )


def sent_over_tensor(
    model: ModelConfig,
    layout: Layout,
    micro_batch: int,
    micro_batches: int,
    share: RankShare,
    loss: str = "compiled",
    chunks: int = 1,
) -> Sent:
    """Return a rank's traffic to the tensor-parallel ranks that share a decoder's layers.

    Args:
        loss: a key of :data:`LOSS_ROWS`.
        chunks: number of chunks in which a micro batch's loss is computed.
    """
    t = layout.tensor
    if t == 1:
        return NOTHING
    each = NOTHING
    again = layout.recompute in ("uniform", "block")
    for lengths, count in Counter(chain(*share.stages)).items():
        # In each direction, attention and MLP have one call at the input and one at the output.
        # With whole activations, one of the two is an all-reduce and the other nothing. Sequence
        # parallelism gathers inputs again for the weight gradients.
        passes = 2 + again
        calls = 2 * passes * (2 if layout.sequence else 1) + 2 * layout.sequence
        calls -= again and not keeps_outputs(model)
        volume = tensor_bytes_per_block(model, layout, micro_batch, lengths)
        each += Sent(calls, volume).times(count)
    own = share.stages[0][0].own
    ends = 2 if layout.sequence else 1
    end = Sent(ends, tensor_bytes_at_ends(model, layout, micro_batch * own))
    each += end.times(share.first + share.last)
    if share.last:
        each += Sent(chunks, (t - 1) * LOSS_ROWS[loss] * 4 * micro_batch * own)
    size = 4 if layout.precision == "fp32" or layout.zero == 0 or layout.grads_in_fp32 else 2
    summed = sum(summed_parameters(model, t, layout.sequence))
    once = Sent(1, 2 * ring(t) * size * summed) if summed else NOTHING
    return each.times(micro_batches) + once


def sent_over_context(
    model: ModelConfig, layout: Layout, micro_batch: int, micro_batches: int, share: RankShare
) -> Sent:
    """Return a rank's average traffic to its context-parallel ranks. A ring has three calls per
    step, all-to-all over heads has two each way, and an all-gather of keys has three."""
    if layout.context == 1:
        return NOTHING
    kind, element = (*layout.comm, "p2p")[0], 2 if layout.precision != "fp32" else 4
    rings = 3 * (layout.context // layout.exchanging - 1)
    calls = {"p2p": rings, "a2a": 4, "allgather": 3, "a2a+p2p": 4 + rings}[kind]
    each = NOTHING
    for lengths, count in Counter(chain(*share.stages)).items():
        tokens = micro_batch * lengths.own
        bytes_of = sum(attention_bytes(layout, heads_of(model, layout.tensor), tokens, element))
        each += Sent(calls, bytes_of).times(count)
    return each.times(micro_batches)


def sent_over_pipeline(
    model: ModelConfig, layout: Layout, micro_batch: int, micro_batches: int, share: RankShare
) -> Sent:
    """Return the traffic of the pipeline rank that sends the most: the messages of each micro
    batch, and the gradients of tied layers once per step."""
    if layout.pipeline == 1:
        return NOTHING
    sent = pipeline_bytes(model, layout, micro_batch, micro_batches)
    return Sent(messages(layout) * micro_batches, sent) + Sent(
        len(share.tied), tied_bytes(layout, share)[1]
    )


def sent_over_data(layout: Layout, share: RankShare) -> Sent:
    """Return a rank's traffic to the replicas of its layers at ZeRO 0: a step's gradients, which
    DeepSpeed all-reduces in calls of up to 500 million elements."""
    if layout.replicas == 1:
        return NOTHING
    calls = -(-share.parameters // 500_000_000)
    return Sent(calls, data_bytes(layout, share.parameters, 1))
