"""Bytes sent by ranks that divide sequences, and by computing a sequence in parts.

Attention of a block over P ranks, s tokens each, with query width q and key width k of a rank's
heads, sends for a micro batch, forward (arXiv:2310.01889, arXiv:2309.14509, arXiv:2407.21783):

- p2p: keys and values to P - 1 ranks, 2 k s (P - 1) numbers, of which causal attention leaves a
  quarter out on average;
- allgather: 2 k s (P - 1);
- a2a: (2 q + 2 k) s (P - 1) / P, where a key head counts for every rank whose queries use it;
- a2a+p2p: the a2a of the ranks that exchange heads, and the p2p of the rings.

The backward pass sends keys and values again, and their gradients in float32; a2a as many as
forward.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from megatron.config import ModelConfig
from megatron.config.layouts import Layout
from megatron.families import BlockLengths
from megatron.features.context.flags import LongContextConfig

GROUPS_ON_DEVICE = 2
"""Groups of layers whose offloaded activations are on the device: the current one, and the one that
is needed next."""

LONG = 16_384
"""Tokens of a sequence from which on it is long: attention is a large part of its work."""


def counts_half(model: ModelConfig) -> bool:
    """Return True if causal attention counts half of the pairs, which is what kernels compute; for
    shorter sequences published numbers count all of them."""
    return model.family == "gpt" and model.seq_length >= LONG


class Heads(NamedTuple):
    """Heads of a rank, of queries and of keys, and their width; ``apart``: of separate products."""

    queries: int
    keys: int
    width: int
    apart: bool = False

    def sent_keys(self, ranks: int) -> int:
        """Key heads that a rank sends where ``ranks`` exchange heads, copies included."""
        if self.keys % ranks == 0:
            return self.keys
        # The most query heads that share a key head in every part of the heads.
        return self.queries // math.gcd(self.queries // self.keys, self.queries // ranks)


def heads_of(model: ModelConfig, tensor: int) -> Heads:
    """Return the heads of one of ``tensor`` ranks."""
    attention, groups = model.attention, model.attention.num_query_groups
    queries, keys = attention.num_attention_heads // tensor, max(1, groups // tensor)
    return Heads(queries, keys, attention.kv_channels, groups < tensor)


def lengths_of_rank(lengths: BlockLengths, ranks: int) -> BlockLengths:
    """Return the sequences of a block on one of the ranks that divide them, whose tokens attend to
    all keys."""
    if ranks == 1:
        return lengths
    return BlockLengths(
        own=lengths.own // ranks,
        other=lengths.other // ranks,
        seen=lengths.keys,
        other_seen=lengths.other_keys,
        inside=tuple(lengths_of_rank(each, ranks) for each in lengths.inside),
    )


def kinds(layout: Layout) -> tuple[str, ...]:
    """Return how blocks communicate over the context; of one value for all, that; else each."""
    return () if layout.context == 1 else layout.comm or ("p2p",)


def attention_bytes(
    layout: Layout, heads: Heads, tokens: int, element: int, causal: bool = True
) -> tuple[float, float]:
    """Return the bytes that attention of a block sends for a micro batch, of the rank that sends
    most, in rings, which computation hides, and in collectives; the mean of blocks that communicate
    in several ways.

    Args:
        tokens: of a rank.
        element: bytes of an activation; gradients of keys are float32 at least.
    """
    ranks, passes = layout.context, 3 if layout.recompute is not None else 2
    rings, collectives, of_gradient = [], [], max(4, element)
    for kind in kinds(layout):
        keys = heads.keys * heads.width * tokens  # numbers of keys and values of half a rank's part
        exchanging = {"a2a": ranks, "a2a+p2p": layout.exchanging}.get(kind, 1)
        ring = gathered = 0.0
        if exchanging > 1:
            keys = heads.sent_keys(exchanging) * heads.width * tokens
            once = 2 * heads.queries * heads.width * tokens + 2 * keys
            gathered = passes * once * element * (exchanging - 1) / exchanging
        if kind == "allgather":
            gathered = 2 * keys * (ranks - 1) * (passes * element + of_gradient)
        else:
            size = ranks // exchanging
            halves = ((size - 1 + r, 2 * (size - 1) - r) for r in range(size))
            if not causal:
                halves = ((2 * (size - 1),) * 2 for _ in range(size))
            ring = keys * max(
                passes * element * there + of_gradient * back for there, back in halves
            )
        rings.append(ring)
        collectives.append(gathered)
    count = max(1, len(rings))
    return sum(rings) / count, sum(collectives) / count


def chunked_on_host(flags: LongContextConfig, layout: Layout, length: int) -> bool:
    """Return True if attention to ``length`` keys has its tensors in host memory."""
    alone = layout.context == 1 or set(layout.comm) == {"a2a"}
    longer = length > flags.ds_sequence_parallel_fpdt_chunk_size
    return flags.ds_sequence_parallel_fpdt_offloading and alone and longer


def attention_widths(layout: Layout, heads: Heads, changed: bool, normalised: bool) -> float:
    """Return the numbers per token that attention keeps on a rank, the mean of blocks that
    communicate in several ways: queries, keys and values as the kernel has them, and its output.

    Args:
        changed: queries and keys are rotated or normalised, and so new tensors, while the values
            keep the whole product that they are part of.
        normalised: that product is kept in any case.
    """
    q, k = heads.queries * heads.width, heads.keys * heads.width
    plain = 2 * (q + k) + changed * (q * (normalised or not heads.apart) + k)
    of_kinds = []
    for kind in kinds(layout) or ("p2p",):
        exchanging = {"a2a": layout.context, "a2a+p2p": layout.exchanging}.get(kind, 1)
        # The exchanged tensors, instead of a rank's own tokens; outputs both ways.
        sent = heads.sent_keys(exchanging) * heads.width
        exchanged = 3 * q + 2 * sent + (q + 2 * k if normalised else 0)
        of_kinds.append(exchanged if exchanging > 1 else plain)
    return sum(of_kinds) / len(of_kinds)


def key_bytes_on_the_way(layout: Layout, heads: Heads, tokens: int, element: int) -> float:
    """Return the bytes of other ranks' keys and values, with gradients in float32, that a block
    holds at a time: all if they are gathered, else the current and the next ones."""
    each, gradients = 2.0 * heads.keys * heads.width * tokens, max(4, element)
    if "allgather" in layout.comm:
        return layout.context * each * (element + gradients)
    return each * (3 * element + 2 * gradients)


def offloads(flags: LongContextConfig, layout: Layout, blocks: int) -> int:
    """Return the number of a stage's ``blocks`` whose kept activations are in host memory."""
    if layout.recompute in ("uniform", "block"):
        return blocks if flags.in_host_memory else 0
    return flags.blocks_offloaded(blocks)
