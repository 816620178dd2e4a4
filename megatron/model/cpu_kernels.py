"""Kernels for CPUs, which :mod:`attention_backends` and :mod:`norm` choose there; GPUs use torch's.

- Causal attention in bfloat16, as GEMMs over blocks of queries. torch's fused kernel multiplies
  small tiles, which takes up to twice the time (benchmarks/RESULTS.md). A block of queries meets
  all keys up to its own end at once. Scores and softmax are in float32, as in the fused kernel, the
  other GEMMs in bfloat16. The probabilities are kept for the backward pass, so this is for short
  sequences.
- RMSNorm, of which torch needs a dozen passes over memory, in chunks of rows that stay in a core's
  caches.

Shapes: B batch, N query heads, K key and value heads, G = N / K query heads that share one, S
sequence, D head width; X = B x K; Q queries of a block, T keys that they see. Of RMSNorm: T rows, C
rows of a chunk, H width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 128
"""Queries of a block."""

_CHUNK = 1 << 16
"""Elements of a chunk of rows: 256 KiB in float32."""


def suits(q_BNSD: Tensor, k_BKTD: Tensor) -> bool:
    """Whether :func:`causal_attention` is for these: on a CPU, in bfloat16, whole sequences whose
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
        # In the layout that the projection reads.
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


def rms_norm(x: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over [..., H], computed in float32 or better; the
    weight and the result have the dtype of ``x`` (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    return _RMSNorm.apply(x, weight_H, epsilon)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
        kind = torch.promote_types(x.dtype, torch.float32)
        x_TH = x.reshape(-1, x.shape[-1])
        factor_T1 = torch.linalg.vector_norm(x_TH, dim=-1, keepdim=True, dtype=kind)
        factor_T1.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight_H, factor_T1)
        y_TH, weight_H = torch.empty_like(x_TH), weight_H.to(kind)
        for x_CH, factor_C1, y_CH in _chunks(x_TH, factor_T1, y_TH):
            y_CH.copy_((x_CH.to(kind) * factor_C1).mul_(weight_H))
        return y_TH.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, factor_T1 = ctx.saved_tensors
        width, kind = x.shape[-1], factor_T1.dtype
        x_TH, weight_H = x.reshape(-1, width), weight.to(kind)
        x_grad_TH, weight_grad_H = torch.empty_like(x_TH), torch.zeros_like(weight_H)
        grad_TH = grad.reshape(-1, width)
        for x_CH, factor_C1, grad_CH, x_grad_CH in _chunks(x_TH, factor_T1, grad_TH, x_grad_TH):
            # With n = x * factor and d = grad * weight: (d - n * mean(n * d)) * factor.
            n_CH, grad_CH = x_CH.to(kind) * factor_C1, grad_CH.to(kind)
            weight_grad_H += (grad_CH * n_CH).sum(0)
            d_CH = grad_CH * weight_H
            mean_C1 = torch.linalg.vecdot(d_CH, n_CH).unsqueeze(-1).div_(width)
            x_grad_CH.copy_(d_CH.addcmul_(n_CH, mean_C1, value=-1).mul_(factor_C1))
        return x_grad_TH.view(x.shape), weight_grad_H.to(weight.dtype), None


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    rows = max(1, _CHUNK // tensors[0].shape[-1])
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)
