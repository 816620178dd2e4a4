"""Attention of a block under context parallelism, where sequences are divided among ranks.

Shapes: B batch, N query heads and K key heads of a tensor-parallel rank, s queries and t keys of
this rank, D head width.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.config import ConfigError
from megatron.features.context.blocks import BlockRule, block_attention
from megatron.features.context.documents import DocumentBounds
from megatron.features.context.exchange import (
    Gathered,
    HeadExchange,
    KeySource,
    Ring,
    Spans,
    spans_of,
    whole_keys,
)
from megatron.features.context.kernels import Scoring
from megatron.kernels.compiler import untraced
from megatron.model.attention_backends import AttentionBackend
from megatron.model.attention_masks import AttentionMasks, AttentionScoring
from megatron.parallel.context import Context
from megatron.parallel.random import tensor_parallel_random
from megatron.parallel.tensor_parallel import autocast_dtype


class ContextAttention:
    """Context-parallel :data:`~megatron.model.attention_backends.AttentionBackend` of a rank.

    - ``a2a``: ranks exchange heads, and ``attend`` computes whole sequences.
    - ``p2p``, ``allgather``: queries stay on their rank. They attend to the keys and values of one
      rank after another, or of all ranks, which are gathered first.
    - ``a2a+p2p``: neighbouring ranks exchange heads, and attend to the keys of one group of
      neighbours after another.

    Masks are those of whole sequences. A bias has the rows of this rank's queries and the columns
    of all keys; with a bias, ``attend`` always computes with gathered keys.

    Args:
        attend: the kernel for whole sequences.
        kind: communication scheme of the block.

    Raises ConfigError if the query heads cannot be divided among the ranks that exchange them.
    """

    def __init__(self, attend: AttentionBackend, context: Context, kind: str, heads: int) -> None:
        self.attend, self.context = attend, context
        exchanging = {"a2a": context.size, "a2a+p2p": context.inner}.get(kind, 1)
        if heads % exchanging:
            raise ConfigError(
                f"--cp-comm-type {kind} divides the query heads among {exchanging} ranks, but a "
                f"tensor-parallel rank has {heads}: a divisor of them, or p2p or allgather"
            )
        self.exchange = HeadExchange(context, exchanging)
        self.gathers = kind == "allgather"

    @untraced  # kernels and collectives in a fixed order, with nothing to fuse between them
    def __call__(
        self,
        q_BNsD: Tensor,
        k_BKtD: Tensor,
        v_BKtD: Tensor,
        scores: AttentionScoring,
        masks: AttentionMasks,
        dropout: float,
        bias: Tensor | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        dtype = autocast_dtype(q_BNsD)
        q, k, v = (x.to(dtype) for x in (q_BNsD, k_BKtD, v_BKtD))
        if bias is not None:
            keys = whole_keys(self.context, k, v)
            return self._attend(q, *keys, scores, masks, dropout, bias, sinks_N)
        if self.exchange.size == 1:
            return self._in_blocks(q, k, v, scores, masks, dropout, sinks_N)
        scores, sinks_N = self._of_heads(q.shape[1], scores, sinks_N)
        q, k, v = self.exchange.scatter_heads(q, k, v)
        y = self._in_blocks(q, k, v, scores, masks, dropout, sinks_N)
        return self.exchange.gather_heads(y)

    def _of_heads(
        self, heads: int, scores: AttentionScoring, sinks_N: Tensor | None
    ) -> tuple[AttentionScoring, Tensor | None]:
        """Return the scoring and attention sinks of the heads that this rank computes."""
        each = heads // self.exchange.size
        first = self.exchange.rank * each
        scores = replace(scores, slopes=scores.slopes[first : first + each])
        return scores, None if sinks_N is None else sinks_N[first : first + each]

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores: AttentionScoring,
        masks: AttentionMasks,
        dropout: float,
        bias: Tensor | None,
        sinks: Tensor | None,
    ) -> Tensor:
        if not dropout:
            return self.attend(q, k, v, scores, masks, 0.0, bias, sinks)
        with tensor_parallel_random(self.context.group):
            return self.attend(q, k, v, scores, masks, dropout, bias, sinks)

    def _in_blocks(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores: AttentionScoring,
        masks: AttentionMasks,
        dropout: float,
        sinks: Tensor | None,
    ) -> Tensor:
        scoring = scoring_of(scores, q.shape[-1], dropout)
        key = ("context", scores, scoring, q.shape[2], k.shape[2], self.exchange.size, self.gathers)
        plan = masks.once(key, lambda: self._plan(q, k, scores, scoring, masks))
        rule = plan.rule
        if dropout:
            # The seed need not be the same on all ranks: tiles also differ by their positions in
            # the sequence, and neighbouring ranks by their heads.
            seed = int(torch.randint(2**62, (), dtype=torch.int64)) + self.exchange.rank
            rule = replace(rule, seed=seed)
        return block_attention(q, k, v, plan.source, rule, plan.spans, sinks)

    def _plan(
        self,
        q: Tensor,
        k: Tensor,
        scores: AttentionScoring,
        scoring: Scoring,
        masks: AttentionMasks,
    ) -> _Plan:
        exchanging = self.exchange.size
        size, rank = self.context.size // exchanging, self.context.rank // exchanging
        rule = block_rule(scores, scoring, masks)
        queries, keys = q.shape[2] * size, k.shape[2] * size
        source: KeySource
        if self.gathers:
            source = Gathered(self.context, keys)
        else:
            source = Ring(self.context, exchanging, rule.sees, queries, keys)
        return _Plan(rule, source, spans_of(rank, size, queries))


class HeadAttention(ContextAttention):
    """Context-parallel attention in which all ranks exchange heads, so that each computes whole
    sequences. Unlike the other kinds, it can be compiled into the graph of its block."""

    def __call__(
        self,
        q_BNsD: Tensor,
        k_BKtD: Tensor,
        v_BKtD: Tensor,
        scores: AttentionScoring,
        masks: AttentionMasks,
        dropout: float,
        bias: Tensor | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        if bias is not None:
            return super().__call__(q_BNsD, k_BKtD, v_BKtD, scores, masks, dropout, bias, sinks_N)
        dtype = autocast_dtype(q_BNsD)
        scores, sinks_N = self._of_heads(q_BNsD.shape[1], scores, sinks_N)
        q, k, v = self.exchange.scatter_heads(*(x.to(dtype) for x in (q_BNsD, k_BKtD, v_BKtD)))
        y = self._attend(q, k, v, scores, masks, dropout, None, sinks_N)
        return self.exchange.gather_heads(y)


def context_attention(
    attend: AttentionBackend, context: Context, kind: str, heads: int
) -> ContextAttention:
    """Return the attention of a block with communication scheme ``kind``. Raises ConfigError, as
    :class:`ContextAttention` does."""
    whole = kind == "a2a" or (kind == "a2a+p2p" and context.inner == context.size)
    return (HeadAttention if whole else ContextAttention)(attend, context, kind, heads)


def scoring_of(scores: AttentionScoring, width: int, dropout: float) -> Scoring:
    """Return the kernels' scoring for heads of a given width."""
    scale = 1 / math.sqrt(width) if scores.scale is None else scores.scale
    return Scoring(scale, scores.softcap, dropout)


def block_rule(scores: AttentionScoring, scoring: Scoring, masks: AttentionMasks) -> BlockRule:
    """Return the block rule that is equivalent to these masks of whole sequences."""
    documents = DocumentBounds.of(masks) if scores.causal == masks.causal else None
    padding = None if scores.causal or documents is not None else masks.tokens
    return BlockRule(scoring, scores.causal, scores.window, scores.slopes, documents, padding)


class _Plan(NamedTuple):
    """Rule and key source, shared by all blocks with the same scoring in a micro batch, and the
    positions of this rank's queries."""

    rule: BlockRule
    source: KeySource
    spans: Spans
