"""Computation of the largest attention logit of each head, which attention kernels do not return.

Shapes: B batch, N query heads and K key heads of a tensor-parallel rank, G = N / K, S queries of
this rank, T keys of the whole sequence, C queries of a block, D head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.model.attention_backends import AttentionBackend
from megatron.model.attention_masks import AttentionMasks, AttentionScoring
from megatron.parallel.context import Context

_MOST = 2**22
"""Maximum number of float32 scores in memory at a time."""


class MeasuredAttention:
    """Attention kernel wrapper that also measures the largest logits of training passes.

    Attributes:
        largest_N: largest logits since the last reset, in float32; None if nothing was measured.
            They are scaled scores of the keys that a query can see, without biases such as
            ALiBi.
    """

    def __init__(self, attend: AttentionBackend, context: Context) -> None:
        self._attend, self._context = attend, context
        self.largest_N: Tensor | None = None

    def __call__(
        self,
        q_BNSD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        scores: AttentionScoring,
        masks: AttentionMasks,
        dropout: float,
        bias: Tensor | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        if torch.is_grad_enabled():
            largest_N = largest_logits(q_BNSD, k_BKSD, scores, masks, self._context)
            if self.largest_N is not None:
                largest_N = torch.maximum(largest_N, self.largest_N)
            self.largest_N = largest_N
        return self._attend(q_BNSD, k_BKSD, v_BKSD, scores, masks, dropout, bias, sinks_N)


@torch.no_grad()
def largest_logits(
    q_BNSD: Tensor,
    k_BKSD: Tensor,
    scores: AttentionScoring,
    masks: AttentionMasks,
    context: Context,
) -> Tensor:
    """Return the largest score of each head, [N], in float32, over the queries of this rank and all
    keys that they can see; minus infinity for a head without visible keys. Scores are computed in
    blocks of queries."""
    k_BKDT = context.whole(k_BKSD.detach(), 2).float().mT
    (samples, heads, queries, width), groups = q_BNSD.shape, k_BKDT.shape[1]
    keys, device = k_BKDT.shape[-1], q_BNSD.device
    scale = 1 / math.sqrt(width) if scores.scale is None else scores.scale
    visible = masks.visible(keys, keys, scores.window, device, scores.causal)
    places_T = torch.arange(keys, device=device)
    places_S = context.positions(keys, device)
    block = max(1, _MOST // (samples * heads * keys))
    largest: list[Tensor] = []
    for start in range(0, queries, block):
        q_BNCD = q_BNSD[:, :, start : start + block].detach().float() * scale
        q_BKXD = q_BNCD.reshape(samples, groups, -1, width)
        scores_BNCT = (q_BKXD @ k_BKDT).view(samples, heads, -1, keys)
        rows_C = places_S[start : start + block]
        seen = rows_C[:, None] >= places_T if scores.causal else None
        if visible is not None:
            seen = visible.expand(*visible.shape[:-2], keys, keys)[..., rows_C, :]
        if seen is not None:
            scores_BNCT.masked_fill_(~seen, -torch.inf)
        largest.append(scores_BNCT.amax((0, 2, 3)))
    return torch.stack(largest).amax(0)
