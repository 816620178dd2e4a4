"""Causal attention on CPUs in bfloat16, as matrix products over blocks of queries.

torch's fused kernel multiplies small tiles, which on CPUs takes up to twice the time of whole
products (benchmarks/RESULTS.md has the figures). Here a block of queries meets all keys up to its
own end at once. Scores and softmax are in float32, as in the fused kernel, the other products in
bfloat16. The probabilities are kept for the backward pass, so this is for short sequences.

Shapes: B batch, N query heads, K key and value heads, G = N / K query heads that share one, S
sequence, D head width; X = B x K; Q queries of a block, T keys that they see.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 128
"""Queries of a block."""


def suits(q_BNSD: Tensor, k_BKTD: Tensor) -> bool:
    """Whether this is for plain causal attention of these: a CPU, bfloat16, whole sequences whose
    probabilities are at most twice as large as queries, keys, values and output together."""
    length, width = q_BNSD.shape[2:]
    on_cpu = q_BNSD.device.type == "cpu" and q_BNSD.dtype == torch.bfloat16
    return on_cpu and k_BKTD.shape[2] == length <= 16 * width


def causal_attention(q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, scale: float) -> Tensor:
    """softmax(scale q k^T) v over the keys up to each query's own, [B, N, S, D]."""
    return _CausalAttention.apply(q_BNSD, k_BKSD, v_BKSD, scale)


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.shape = scale, q.shape
        batch, heads, length, width = q.shape
        values_XSD, kept = _flat(v), []
        # In the order in which the projection takes it.
        y_BSND = q.new_empty(batch, length, heads, width)
        y_XGSD = y_BSND.permute(0, 2, 1, 3).unflatten(1, (k.shape[1], -1))
        for (first, end), weights_XQT in _softmax(q, k, scale):
            y_XQD = torch.bmm(weights_XQT, values_XSD[:, :end])
            block = y_XGSD[..., first:end, :]
            block.copy_(y_XQD.view(block.shape))
            kept.append(weights_XQT)
        ctx.save_for_backward(q, k, v, *kept)
        return y_BSND.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *kept = ctx.saved_tensors
        groups = k.shape[1]
        grads_XGSD, queries_XGSD = _grouped(grad, groups), _grouped(q, groups)
        keys_XSD, values_XSD = _flat(k), _flat(v)
        q_grad_XGSD = torch.empty_like(queries_XGSD)
        # Sums over blocks.
        sums = torch.float32 if q.shape[2] > BLOCK else q.dtype
        k_grad_XSD, v_grad_XSD = (torch.zeros_like(keys_XSD, dtype=sums) for _ in range(2))
        for (first, end), weights_XQT in zip(_blocks(q.shape[2]), kept, strict=True):
            at = slice(first, end)
            grads_XQD, queries_XQD = (x[:, :, at].flatten(1, 2) for x in (grads_XGSD, queries_XGSD))
            v_grad_XSD[:, :end] += torch.bmm(weights_XQT.transpose(1, 2), grads_XQD)
            dots_XQT = torch.bmm(grads_XQD, values_XSD[:, :end].transpose(1, 2))
            scores_XQT = torch._softmax_backward_data(dots_XQT, weights_XQT, -1, q.dtype)
            k_grad_XSD[:, :end] += torch.bmm(scores_XQT.transpose(1, 2), queries_XQD)
            q_grad_XQD = torch.bmm(scores_XQT, keys_XSD[:, :end])
            q_grad_XGSD[:, :, at] = q_grad_XQD.unflatten(1, (-1, end - first))
        q_grad = q_grad_XGSD.mul_(ctx.scale).view(q.shape)
        k_grad = k_grad_XSD.mul_(ctx.scale).to(k.dtype).view(k.shape)
        return q_grad, k_grad, v_grad_XSD.to(v.dtype).view(v.shape), None


def _softmax(
    q_BNSD: Tensor, k_BKSD: Tensor, scale: float
) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """(first, end) of each block of queries, and its probabilities [X, Q, T], Q group by group."""
    queries_XGSD = _grouped(q_BNSD, k_BKSD.shape[1]).float() * scale
    keys_XSD = _flat(k_BKSD).float()
    later_QQ = torch.full((BLOCK, BLOCK), -torch.inf).triu(1)
    for first, end in _blocks(q_BNSD.shape[2]):
        count = end - first
        queries_XQD = queries_XGSD[:, :, first:end].flatten(1, 2)
        scores_XQT = torch.bmm(queries_XQD, keys_XSD[:, :end].transpose(1, 2))
        own = scores_XQT.unflatten(1, (-1, count))[..., first:]
        own += later_QQ[:count, :count]
        weights_XQT = torch.softmax(scores_XQT, -1, out=scores_XQT)
        yield (first, end), weights_XQT.to(q_BNSD.dtype)


def _blocks(length: int) -> list[tuple[int, int]]:
    return [(first, min(first + BLOCK, length)) for first in range(0, length, BLOCK)]


def _flat(x_BKSD: Tensor) -> Tensor:
    return x_BKSD.flatten(0, 1).contiguous()


def _grouped(x_BNSD: Tensor, kv_heads: int) -> Tensor:
    return x_BNSD.unflatten(1, (kv_heads, -1)).flatten(0, 1).contiguous()
