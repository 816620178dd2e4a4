"""Bytes sent by context parallelism, and effects of long-context options on memory.

Attention of a block over P ranks, with s tokens per rank, query width q and key width k of a rank's
heads, sends in the forward pass of a micro batch (arXiv:2310.01889, arXiv:2309.14509,
arXiv:2407.21783):

- p2p: keys and values to P - 1 ranks, 2 k s (P - 1) numbers, of which causal attention leaves out a
  quarter on average;
- allgather: 2 k s (P - 1);
- a2a: (2 q + 2 k) s (P - 1) / P, where a key head counts for every rank whose queries use it;
- a2a+p2p: the a2a of the ranks that exchange heads, and the p2p of the rings.

The backward pass sends keys and values again, and their gradients in float32. With a2a it sends as
much as the forward pass.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from megatron.config import ModelConfig
from megatron.config.layouts import Layout
from megatron.families import BlockLengths
from megatron.features.context.flags import LongContextConfig

GROUPS_ON_DEVICE = 2
"""Number of groups of layers whose offloaded activations are on the device at a time: the current
group and the next one in the backward pass."""

LONG = 16_384
"""Sequence length in tokens from which attention accounts for a large share of the FLOPs."""


def counts_half(model: ModelConfig) -> bool:
    """Return whether FLOPs of causal attention count only half of the query-key pairs, as kernels
    compute them. Published figures for shorter sequences count all pairs."""
    return model.family == "gpt" and model.seq_length >= LONG


class Heads(NamedTuple):
    """Numbers of query and key heads of a rank, and their width. ``apart`` is True if separate
    GEMMs compute queries and keys."""

    queries: int
    keys: int
    width: int
    apart: bool = False

    def sent_keys(self, ranks: int) -> int:
        """Return the number of key heads, including copies, that a rank sends if ``ranks`` exchange
        heads."""
        if self.keys % ranks == 0:
            return self.keys
        # Largest number of query heads that share a key head on every receiving rank.
        return self.queries // math.gcd(self.queries // self.keys, self.queries // ranks)


def heads_of(model: ModelConfig, tensor: int) -> Heads:
    """Return the heads of one of ``tensor`` tensor-parallel ranks."""
    attention, groups = model.attention, model.attention.num_query_groups
    queries, keys = attention.num_attention_heads // tensor, max(1, groups // tensor)
    return Heads(queries, keys, attention.kv_channels, groups < tensor)


def lengths_of_rank(lengths: BlockLengths, ranks: int) -> BlockLengths:
    """Return the sequence lengths of a block on one of ``ranks`` context-parallel ranks. Its tokens
    attend to all keys."""
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
    """Return the communication schemes: one for all blocks, or one per block. Empty without context
    parallelism."""
    return () if layout.context == 1 else layout.comm or ("p2p",)


def attention_bytes(
    layout: Layout, heads: Heads, tokens: int, element: int, causal: bool = True
) -> tuple[float, float]:
    """Return the bytes that the attention of a block sends for a micro batch, on the rank that
    sends most: in rings, which overlap with computation, and in collectives. If blocks use
    different schemes, return the mean over blocks.

    Args:
        tokens: number of tokens per rank.
        element: bytes per element of an activation; gradients of keys have at least 4.
    """
    ranks, passes = layout.context, 3 if layout.recompute is not None else 2
    rings, collectives, of_gradient = [], [], max(4, element)
    for kind in kinds(layout):
        # number of elements in the keys and values of half of a rank's tokens
        keys = heads.keys * heads.width * tokens
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
    """Return whether attention to ``length`` keys keeps its tensors in host memory."""
    alone = layout.context == 1 or set(layout.comm) == {"a2a"}
    longer = length > flags.ds_sequence_parallel_fpdt_chunk_size
    return flags.ds_sequence_parallel_fpdt_offloading and alone and longer


def attention_widths(layout: Layout, heads: Heads, changed: bool, normalised: bool) -> float:
    """Return the number of elements per token that attention keeps on a rank for the backward pass:
    queries, keys and values as the kernel reads them, and its output. If blocks use different
    schemes, return the mean over blocks.

    Args:
        changed: True if queries and keys are rotated or normalised, which creates new tensors. The
            values then keep the whole output of the QKV projection alive.
        normalised: True if the output of the QKV projection is kept in any case.
    """
    q, k = heads.queries * heads.width, heads.keys * heads.width
    plain = 2 * (q + k) + changed * (q * (normalised or not heads.apart) + k)
    of_kinds = []
    for kind in kinds(layout) or ("p2p",):
        exchanging = {"a2a": layout.context, "a2a+p2p": layout.exchanging}.get(kind, 1)
        # Exchanged tensors are kept instead of the rank's own; outputs are kept before and after.
        sent = heads.sent_keys(exchanging) * heads.width
        exchanged = 3 * q + 2 * sent + (q + 2 * k if normalised else 0)
        of_kinds.append(exchanged if exchanging > 1 else plain)
    return sum(of_kinds) / len(of_kinds)


def key_bytes_on_the_way(layout: Layout, heads: Heads, tokens: int, element: int) -> float:
    """Return the maximum bytes of other ranks' keys and values, with gradients in float32, that are
    on a rank. With allgather these are all, otherwise those of the current and next steps."""
    each, gradients = 2.0 * heads.keys * heads.width * tokens, max(4, element)
    if "allgather" in layout.comm:
        return layout.context * each * (element + gradients)
    return each * (3 * element + 2 * gradients)


def offloads(flags: LongContextConfig, layout: Layout, blocks: int) -> int:
    """Return how many of a stage's ``blocks`` keep their activations in host memory."""
    if layout.recompute in ("uniform", "block"):
        return blocks if flags.in_host_memory else 0
    return flags.blocks_offloaded(blocks)
