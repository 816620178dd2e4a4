"""Cross entropy over a vocabulary that is cut over tensor-parallel ranks.

Shapes: T tokens (batch x sequence), VP one rank's share of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.groups import Group

CHUNK_BYTES = 16 * 2**20
"""Size of the float32 work space; logits are worked through in row chunks of this size."""


def vocab_parallel_cross_entropy(
    logits_BSV: Tensor, labels_BS: Tensor, vocab_size: int, group: Group
) -> Tensor:
    """-log softmax(logits)[label] of every token, float32 (float64 for float64 logits).

    Columns from ``vocab_size`` on are padding and take no part. The backward pass overwrites the
    logits with their gradient, so that they are never in memory twice, and float32 copies exist
    only chunk by chunk; the logits must not be used after the backward pass.

    Args:
        logits_BSV: this rank's columns of the logits, [B, S, VP].
        labels_BS: token ids, [B, S].
        vocab_size: number of tokens of the whole vocabulary without padding.
        group: the tensor-parallel group.

    Returns:
        [B, S], the same on every rank of ``group``.
    """
    return _CrossEntropy.apply(logits_BSV, labels_BS, vocab_size, group)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_BSV: Tensor, labels_BS: Tensor, vocab_size: int, group: Group
    ) -> Tensor:
        width = logits_BSV.shape[-1]
        logits_TV = logits_BSV.reshape(-1, width)
        first = group.rank * width
        used = max(0, min(width, vocab_size - first))
        columns_T = labels_BS.reshape(-1) - first
        absent_T = (columns_T < 0) | (columns_T >= used)
        columns_T = columns_T.masked_fill(absent_T, 0)
        work = torch.float64 if logits_TV.dtype == torch.float64 else torch.float32

        target_T = logits_TV.gather(1, columns_T.unsqueeze(1)).squeeze(1).to(work)
        target_T = target_T.masked_fill(absent_T, 0.0)
        norm_T = torch.empty_like(target_T)
        if used:
            for rows in _chunks(logits_TV):
                norm_T[rows] = logits_TV[rows, :used].to(work).logsumexp(-1)
        else:
            norm_T.fill_(-torch.inf)
        if group.size > 1:
            norm_T = _logsumexp_over_ranks(norm_T, group)
            dist.all_reduce(target_T, group=group.handle)
        ctx.save_for_backward(logits_TV, columns_T, absent_T, norm_T)
        ctx.used, ctx.shape = used, logits_BSV.shape
        return (norm_T - target_T).view(labels_BS.shape)

    @staticmethod
    def backward(ctx: Any, grad_BS: Tensor) -> tuple[Tensor, None, None, None]:
        logits_TV, columns_T, absent_T, norm_T = ctx.saved_tensors
        grad_T = grad_BS.reshape(-1)
        at_label_T = -grad_T.masked_fill(absent_T, 0.0)
        for rows in _chunks(logits_TV):
            chunk = logits_TV[rows]
            chunk[:, ctx.used :] = 0.0
            if ctx.used:
                softmax = chunk[:, : ctx.used].to(norm_T.dtype) - norm_T[rows, None]
                softmax.exp_().mul_(grad_T[rows, None])
                softmax.scatter_add_(1, columns_T[rows, None], at_label_T[rows, None])
                chunk[:, : ctx.used] = softmax
        return logits_TV.view(ctx.shape), None, None, None


def _chunks(logits_TV: Tensor) -> list[slice]:
    tokens, width = logits_TV.shape
    step = max(1, CHUNK_BYTES // (4 * max(1, width)))
    return [slice(start, start + step) for start in range(0, tokens, step)]


def _logsumexp_over_ranks(norm_T: Tensor, group: Group) -> Tensor:
    largest_T = norm_T.clone()
    dist.all_reduce(largest_T, op=dist.ReduceOp.MAX, group=group.handle)
    total_T = (norm_T - largest_T).exp()
    dist.all_reduce(total_T, group=group.handle)
    return largest_T + total_T.log()


def masked_mean(loss_BS: Tensor, mask_BS: Tensor) -> Tensor:
    """Mean of the losses where the mask is 1; zero when it is 1 nowhere."""
    return (loss_BS * mask_BS).sum() / mask_BS.sum().clamp(min=1.0)
