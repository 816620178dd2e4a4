"""Attention of some queries to some keys, with statistics for merging such results.

The forward pass returns the output and L, the log-sum-exp of each query's scores. The backward pass
takes the output and L of ALL keys. Then exp(score - L) is the weight of a key among all keys, and
the sum of gradient x output over the width is the weighted mean of the weights' gradients, so that
gradients can be computed block by block and added (Liu et al. 2023, arXiv:2310.01889).

torch's fused kernels are used where possible: on CPUs for every dtype, on GPUs the flash kernel for
half precision without a mask, and the memory-efficient kernel with a mask or in float32. Softcapped
scores, dropout, and float64 on GPUs are computed by GEMMs, a few rows of scores at a time.

Shapes: B batch, N query heads, K key heads, G = N / K query heads that share one, S queries, T
keys, R rows of S, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_SCORES = 1 << 23
"""Maximum number of scores computed at a time by GEMMs."""

_ROWS_OF_SUMS = 32
"""The memory-efficient kernel pads the queries of the log-sum-exp to a multiple of this."""

_BIAS_ALIGNMENT = 8
"""Alignment, in elements, of the rows of the memory-efficient kernel's mask."""


@dataclass(frozen=True)
class Scoring:
    """Scoring of a kernel: scores are ``scale`` x q k, then softcap x tanh(score / softcap).
    ``dropout`` is the dropout probability of the attention weights."""

    scale: float
    softcap: float | None = None
    dropout: float = 0.0


def mask_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype of masks for :func:`forward`. On CPUs it is at least float32."""
    if q.device.type == "cpu":
        return torch.promote_types(q.dtype, torch.float32)
    return q.dtype


def empty_mask(shape: tuple[int, ...], q: Tensor) -> Tensor:
    """Return an uninitialized mask, whose rows are aligned as kernels on GPUs require."""
    width = -(-shape[-1] // _BIAS_ALIGNMENT) * _BIAS_ALIGNMENT
    return q.new_empty(*shape[:-1], width, dtype=mask_dtype(q))[..., : shape[-1]]


def forward(
    q_BNSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    scoring: Scoring,
    causal: bool = False,
    mask: Tensor | None = None,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the output [B, N, S, D] and L [B, N, S], in float32 or wider.

    With ``causal``, S = T and query i sees keys 0 to i. The mask is added to the scores, and must
    be broadcastable to [B, N, S, T]. Its values for hidden keys must be finite, so that L of a row
    without visible keys is very negative instead of undefined. ``seed`` determines the dropout."""
    if _by_products(q_BNSD, scoring):
        return _products(q_BNSD, k_BKTD, v_BKTD, scoring, causal, mask, seed)
    scale = scoring.scale
    if q_BNSD.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_BNSD, k_BKTD, v_BKTD, 0.0, causal, attn_mask=mask, scale=scale
        )
    if mask is None and _has_flash(q_BNSD):
        return torch.ops.aten._scaled_dot_product_flash_attention(
            q_BNSD, k_BKTD, v_BKTD, 0.0, causal, False, scale=scale
        )[:2]
    k_BNTD, v_BNTD = (_expanded(x, q_BNSD) for x in (k_BKTD, v_BKTD))
    y, sums, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q_BNSD, k_BNTD, v_BNTD, _whole(mask, q_BNSD, k_BKTD), True, 0.0, causal, scale=scale
    )
    return y, sums[..., : q_BNSD.shape[2]]


def backward(
    grad_BNSD: Tensor,
    q_BNSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    y_BNSD: Tensor,
    sums_BNS: Tensor,
    scoring: Scoring,
    causal: bool = False,
    mask: Tensor | None = None,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values. ``y_BNSD`` and ``sums_BNS`` are the final
    output and L; the other arguments are those of :func:`forward`."""
    if _by_products(q_BNSD, scoring):
        return _products_backward(
            grad_BNSD, q_BNSD, k_BKTD, v_BKTD, y_BNSD, sums_BNS, scoring, causal, mask, seed
        )
    scale = scoring.scale
    if q_BNSD.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_BNSD, q_BNSD, k_BKTD, v_BKTD, y_BNSD, sums_BNS, 0.0, causal,
            attn_mask=mask, scale=scale,
        )  # fmt: skip
    queries, keys = q_BNSD.shape[2], k_BKTD.shape[2]
    if mask is None and _has_flash(q_BNSD):
        # Without dropout, the random state is unused. The shapes determine the sequence lengths.
        random = torch.empty(2, dtype=torch.uint64, device=q_BNSD.device)
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad_BNSD, q_BNSD, k_BKTD, v_BKTD, y_BNSD, sums_BNS.contiguous(), None, None,
            queries, keys, 0.0, causal, random, random, scale=scale,
        )  # fmt: skip
    random = torch.empty((), dtype=torch.int64, device=q_BNSD.device)
    k_BNTD, v_BNTD = (_expanded(x, q_BNSD) for x in (k_BKTD, v_BKTD))
    padded = F.pad(sums_BNS, (0, -queries % _ROWS_OF_SUMS), value=math.inf)
    # The kernel ignores the strides of the output and assumes that a token's heads are adjacent.
    y_BNSD = y_BNSD.transpose(1, 2).contiguous().transpose(1, 2)
    q_grad, *grads, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad_BNSD, q_BNSD, k_BNTD, v_BNTD, _whole(mask, q_BNSD, k_BKTD), y_BNSD, padded,
        random, random, 0.0, [True, True, True, False], causal, scale=scale,
    )  # fmt: skip
    heads = k_BKTD.shape[1]
    k_grad, v_grad = (x.unflatten(1, (heads, -1)).sum(2, dtype=torch.float32) for x in grads)
    return q_grad, k_grad, v_grad


def _by_products(q: Tensor, scoring: Scoring) -> bool:
    no_kernel = q.device.type != "cpu" and q.dtype == torch.float64
    return bool(scoring.dropout) or scoring.softcap is not None or no_kernel


def _has_flash(q: Tensor) -> bool:
    """Return whether torch's flash kernel supports the queries' dtype, head width and GPU."""
    width = q.shape[-1]
    fits = q.dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and width <= 256
    return fits and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _expanded(x_BKTD: Tensor, q_BNSD: Tensor) -> Tensor:
    groups = q_BNSD.shape[1] // x_BKTD.shape[1]
    return x_BKTD if groups == 1 else x_BKTD.repeat_interleave(groups, dim=1)


def _whole(mask: Tensor | None, q_BNSD: Tensor, k_BKTD: Tensor) -> Tensor | None:
    return None if mask is None else mask.expand(*q_BNSD.shape[:3], k_BKTD.shape[2])


def _products(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scoring: Scoring,
    causal: bool,
    mask: Tensor | None,
    seed: int,
) -> tuple[Tensor, Tensor]:
    kind = torch.promote_types(q.dtype, torch.float32)
    y, sums = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=kind)
    random = torch.Generator(q.device).manual_seed(seed)
    with torch.autocast(q.device.type, enabled=False):
        for rows in _rows(q, k):
            scores = _scores(q, k, scoring, causal, mask, rows)
            sums[:, :, rows] = scores.logsumexp(-1).flatten(1, 2)
            weights = torch.exp_(
                scores - sums[:, :, rows].unflatten(1, (k.shape[1], -1))[..., None]
            )
            if scoring.dropout:
                weights *= _kept(weights, scoring.dropout, random)
            y[:, :, rows] = (weights.to(v.dtype) @ v[:, :, None]).flatten(1, 2)
    return y, sums


def _products_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    sums: Tensor,
    scoring: Scoring,
    causal: bool,
    mask: Tensor | None,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor]:
    kind, heads = sums.dtype, k.shape[1]
    q_grad = torch.empty_like(q)
    k_grad, v_grad = (torch.zeros_like(x, dtype=kind) for x in (k, v))
    random = torch.Generator(q.device).manual_seed(seed)
    with torch.autocast(q.device.type, enabled=False):
        for rows in _rows(q, k):
            of_y, of_q, out, total = (
                x[:, :, rows].unflatten(1, (heads, -1)) for x in (grad, q, y, sums)
            )
            scores = _scores(q, k, scoring, causal, mask, rows)
            slope: Tensor | float = 1.0
            if scoring.softcap is not None:
                capped = _scores(q, k, scoring, False, None, rows)
                slope = 1 - capped.div_(scoring.softcap).square_()
            weights = torch.exp_(scores - total[..., None])
            of_weights = (of_y @ v[:, :, None].mT).to(kind)
            used = weights
            if scoring.dropout:
                kept = _kept(weights, scoring.dropout, random)
                used, of_weights = weights * kept, of_weights.mul_(kept)
            v_grad += (used.to(v.dtype).mT @ of_y).sum(2, dtype=kind)
            means = torch.linalg.vecdot(of_y.to(kind), out.to(kind))[..., None]
            of_scores = (weights * (of_weights - means) * slope).mul_(scoring.scale).to(q.dtype)
            q_grad[:, :, rows] = (of_scores @ k[:, :, None]).flatten(1, 2)
            k_grad += (of_scores.mT @ of_q).sum(2, dtype=kind)
    return q_grad, k_grad, v_grad


def _rows(q: Tensor, k: Tensor) -> Iterator[slice]:
    count = max(1, _SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    for first in range(0, q.shape[2], count):
        yield slice(first, min(first + count, q.shape[2]))


def _scores(
    q: Tensor, k: Tensor, scoring: Scoring, causal: bool, mask: Tensor | None, rows: slice
) -> Tensor:
    """Return scores [B, K, G, R, T] in float32 or wider."""
    kind = torch.promote_types(q.dtype, torch.float32)
    queries = q[:, :, rows].to(kind).unflatten(1, (k.shape[1], -1))
    scores = (queries @ k[:, :, None].to(kind).mT).mul_(scoring.scale)
    if scoring.softcap is not None:
        scores = scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    if mask is not None:
        part = mask if mask.shape[2] == 1 else mask[:, :, rows]
        heads = (k.shape[1], -1) if part.shape[1] > 1 else (1, 1)
        scores += part.unflatten(1, heads)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        scores.masked_fill_(later.triu(rows.start + 1), -math.inf)
    return scores


def _kept(weights: Tensor, dropout: float, random: torch.Generator) -> Tensor:
    """Return the dropout mask: 1 / (1 - p) for weights that are kept, else 0."""
    return torch.empty_like(weights).bernoulli_(1 - dropout, generator=random).div_(1 - dropout)
