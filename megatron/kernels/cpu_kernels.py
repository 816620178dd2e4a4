"""Kernels for CPUs, which attention and norms choose there; GPUs use torch's.

- Attention in bfloat16, as GEMMs over blocks of queries. torch's fused kernel multiplies small
  tiles, which takes up to twice the time (benchmarks/RESULTS.md). A block of queries meets all keys
  at once, in causal attention all up to its own end. Scores and softmax are in float32, as in the
  fused kernel, the other GEMMs in bfloat16. The probabilities are kept for the backward pass, so
  this is for short sequences.
- torch's fused attention with sinks.
- RMSNorm, of which torch needs a dozen passes over memory, in chunks of rows that stay in a core's
  caches.

Shapes: B batch, N query heads, K key and value heads, G = N / K query heads that share one, S
queries, T keys, D head width; X = B x K; Q queries of a block, P keys that they see. Of RMSNorm: T
rows, C rows of a chunk, H width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 128
"""Queries of a block in causal attention, where a larger one would meet more keys in vain."""

WHOLE_BLOCK = 256
"""Queries of a block that sees all keys."""

_CHUNK = 1 << 16
"""Elements of a chunk of rows: 256 KiB in float32."""


def suits(q_BNSD: Tensor, k_BKTD: Tensor, causal: bool = True) -> bool:
    """True if :func:`attention` is for these: on a CPU, in bfloat16, probabilities at most twice as
    large as queries, keys, values and output together; causally, as many keys as queries."""
    queries, width = q_BNSD.shape[2:]
    keys = k_BKTD.shape[2]
    if q_BNSD.device.type != "cpu" or q_BNSD.dtype != torch.bfloat16:
        return False
    if causal:
        return keys == queries <= 16 * width
    return queries * keys <= 4 * width * (queries + keys)


def attention(
    q_BNSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    scale: float,
    causal: bool = True,
    bias: Tensor | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T + bias) v over all keys or, causally, those up to each query's own,
    [B, N, S, D]. The bias has four dimensions, broadcastable to [B, N, S, T], and may need a
    gradient. Sinks are further scores, whose weights multiply nothing."""
    return _Attention.apply(q_BNSD, k_BKTD, v_BKTD, bias, sinks_N, scale, causal)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        scale: float,
        causal: bool,
    ) -> Tensor:
        ctx.scale, ctx.causal = scale, causal
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        batch, heads, length, width = q.shape
        values_XTD, kept = _flat(v), []
        # In the layout that the projection reads.
        y_BSND = q.new_empty(batch, length, heads, width)
        y_XGSD = y_BSND.permute(0, 2, 1, 3).unflatten(1, (k.shape[1], -1))
        y, sunk_BNS = y_BSND.transpose(1, 2), None
        if sinks is not None:
            sunk_BNS = q.new_empty(batch, heads, length, dtype=torch.float32)
        for (first, end, seen), weights_XQP in _softmax(q, k, bias, sinks, scale, causal):
            if sunk_BNS is not None:
                part = sunk_BNS[..., first:end]
                part.copy_(weights_XQP[..., -1].view(part.shape))
                weights_XQP = weights_XQP[..., :-1]
            weights_XQP = weights_XQP.to(q.dtype)
            y_XQD = torch.bmm(weights_XQP, values_XTD[:, :seen])
            block = y_XGSD[..., first:end, :]
            block.copy_(y_XQD.view(block.shape))
            kept.append(weights_XQP)
        ctx.sinks = None if sinks is None else sinks.dtype
        # The output is kept in any case, by the projection.
        ctx.save_for_backward(q, k, v, sunk_BNS, y if sinks is not None else None, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sunk_BNS, y, *kept = ctx.saved_tensors
        groups = k.shape[1]
        grads_XGSD, queries_XGSD = _grouped(grad, groups), _grouped(q, groups)
        keys_XTD, values_XTD = _flat(k), _flat(v)
        q_grad_XGSD = torch.empty_like(queries_XGSD)
        blocks = _blocks(q.shape[2], k.shape[2], ctx.causal)
        k_grad_XTD, v_grad_XTD = (
            None if len(blocks) == 1 else torch.zeros_like(x, dtype=torch.float32)
            for x in (keys_XTD, values_XTD)
        )
        bias_grad = None
        if ctx.needs_input_grad[3]:
            shape, dtype = ctx.bias
            bias_grad = torch.zeros(shape, dtype=dtype, device=q.device)
        for (first, end, seen), weights_XQP in zip(blocks, kept, strict=True):
            at = slice(first, end)
            grads_XQD, queries_XQD = (x[:, :, at].flatten(1, 2) for x in (grads_XGSD, queries_XGSD))
            v_grad_XTD = _plus(v_grad_XTD, torch.bmm(weights_XQP.transpose(1, 2), grads_XQD))
            dots_XQP = torch.bmm(grads_XQD, values_XTD[:, :seen].transpose(1, 2))
            scores_XQP = torch._softmax_backward_data(dots_XQP, weights_XQP, -1, q.dtype)
            k_grad_XTD = _plus(k_grad_XTD, torch.bmm(scores_XQP.transpose(1, 2), queries_XQD))
            q_grad_XQD = torch.bmm(scores_XQP, keys_XTD[:, :seen])
            q_grad_XGSD[:, :, at] = q_grad_XQD.unflatten(1, (-1, end - first))
            if bias_grad is not None:
                part = _part(bias_grad, first, end, seen)
                part += _by_head(scores_XQP, q, end - first).sum_to_size(part.shape)
        q_grad = q_grad_XGSD.mul_(ctx.scale).view(q.shape)
        assert k_grad_XTD is not None and v_grad_XTD is not None
        k_grad = k_grad_XTD.mul_(ctx.scale).to(k.dtype).view(k.shape)
        v_grad, sinks_grad = v_grad_XTD.to(v.dtype).view(v.shape), None
        if sunk_BNS is not None:
            sinks_grad = _sinks_gradient(grad, y, sunk_BNS).to(ctx.sinks)
        return q_grad, k_grad, v_grad, bias_grad, sinks_grad, None, None


def _sinks_gradient(grad: Tensor, y: Tensor, sunk_BNS: Tensor) -> Tensor:
    """[N], from the weights of the sinks: that of a sink takes from all others in proportion."""
    dots_BNS = torch.linalg.vecdot(grad.to(sunk_BNS.dtype), y.to(sunk_BNS.dtype))
    return -(sunk_BNS * dots_BNS).sum((0, 2))


def sink_attention(
    q_BNSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    sinks_N: Tensor,
    scale: float | None,
    causal: bool,
    mask: Tensor | None,
) -> Tensor:
    """As :func:`attention` with sinks, by torch's fused kernel: in any dtype of floating point,
    with another ``mask`` than the causal one, which is added to the scores and has no gradient.
    ``scale`` is None for 1 / sqrt(D)."""
    return _SinkAttention.apply(q_BNSD, k_BKTD, v_BKTD, sinks_N, scale, causal, mask)


class _SinkAttention(torch.autograd.Function):
    """The kernel also returns the logarithm of the sum of exponentials of each query's scores. With
    the sink's added to it, and the output reduced accordingly, the kernel's backward pass computes
    the gradients with sinks: all that it knows of the weights is exp(score - this logarithm) and
    that their mean of the gradients is the product of the output and its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        scale: float | None,
        causal: bool,
        mask: Tensor | None,
    ) -> Tensor:
        ctx.scale, ctx.causal = scale, causal
        y, sums_BNS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
        sinks_N1 = sinks.to(sums_BNS.dtype)[:, None]
        y = (y * torch.sigmoid(sums_BNS - sinks_N1)[..., None]).to(y.dtype)
        ctx.save_for_backward(q, k, v, sinks, mask, y, torch.logaddexp(sums_BNS, sinks_N1))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, mask, y, sums_BNS = ctx.saved_tensors
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, y, sums_BNS, 0.0, ctx.causal, attn_mask=mask, scale=ctx.scale
        )
        sunk_BNS = torch.exp(sinks.to(sums_BNS.dtype)[:, None] - sums_BNS)
        return *grads, _sinks_gradient(grad, y, sunk_BNS).to(sinks.dtype), None, None, None


def _plus(sum_XTD: Tensor | None, addend_XPD: Tensor) -> Tensor:
    """The sum of blocks' gradients for the first keys, in place; without a sum that of a single
    block."""
    if sum_XTD is None:
        return addend_XPD
    sum_XTD[:, : addend_XPD.shape[1]] += addend_XPD
    return sum_XTD


def _softmax(
    q_BNSD: Tensor,
    k_BKTD: Tensor,
    bias: Tensor | None,
    sinks_N: Tensor | None,
    scale: float,
    causal: bool,
) -> Iterator[tuple[tuple[int, int, int], Tensor]]:
    """The blocks and their weights in float32; with sinks the last column is theirs."""
    queries_XGSD = _grouped(q_BNSD, k_BKTD.shape[1]).float() * scale
    keys_XTD, more = _flat(k_BKTD).float(), 0 if sinks_N is None else 1
    if sinks_N is not None:
        # Products with one more key make room for a sink.
        keys_XTD = torch.nn.functional.pad(keys_XTD, (0, 0, 0, 1))
    later_QQ = torch.full((BLOCK, BLOCK), -torch.inf).triu(1) if causal else None
    for first, end, seen in _blocks(q_BNSD.shape[2], k_BKTD.shape[2], causal):
        count = end - first
        queries_XQD = queries_XGSD[:, :, first:end].flatten(1, 2)
        scores_XQP = torch.bmm(queries_XQD, keys_XTD[:, : seen + more].transpose(1, 2))
        if sinks_N is not None:
            _by_head(scores_XQP, q_BNSD, count)[..., -1] = sinks_N[:, None]
        if later_QQ is not None:
            own = scores_XQP.unflatten(1, (-1, count))[..., first:seen]
            own += later_QQ[:count, :count]
        if bias is not None:
            by_head = _by_head(scores_XQP, q_BNSD, count)[..., :seen]
            by_head.add_(_part(bias, first, end, seen))
        yield (first, end, seen), torch.softmax(scores_XQP, -1, out=scores_XQP)


def _by_head(scores_XQP: Tensor, q_BNSD: Tensor, count: int) -> Tensor:
    """The scores of a block of ``count`` queries as [B, N, Q, P]; a view."""
    return scores_XQP.view(*q_BNSD.shape[:2], count, -1)


def _part(bias: Tensor, first: int, end: int, seen: int) -> Tensor:
    """Return the part of a bias that belongs to the scores of a block; a view."""
    queries = slice(None) if bias.shape[2] == 1 else slice(first, end)
    return bias[:, :, queries, :seen]


def _blocks(queries: int, keys: int, causal: bool) -> list[tuple[int, int, int]]:
    """(first query, end, keys that they see) of each block."""
    size = BLOCK if causal else WHOLE_BLOCK
    ends = [(first, min(first + size, queries)) for first in range(0, queries, size)]
    return [(first, end, end if causal else keys) for first, end in ends]


def _flat(x_BKSD: Tensor) -> Tensor:
    return x_BKSD.flatten(0, 1).contiguous()


def _grouped(x_BNSD: Tensor, kv_heads: int) -> Tensor:
    return x_BNSD.unflatten(1, (kv_heads, -1)).flatten(0, 1).contiguous()


def rms_norm(x: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over [..., H], computed in float32 or better; the
    weight and the result have the dtype of ``x`` (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x, weight_H, epsilon)
    return _rms_norm(x, weight_H, epsilon)[0]


def _rms_norm(x: Tensor, weight_H: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The result, and the factor [T, 1] of each row."""
    kind = torch.promote_types(x.dtype, torch.float32)
    x_TH, weight_H = x.reshape(-1, x.shape[-1]), weight_H.to(kind)
    factor_T1 = torch.linalg.vector_norm(x_TH, dim=-1, keepdim=True, dtype=kind)
    factor_T1.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
    if x.numel() <= _CHUNK:
        y_TH = (x_TH.to(kind) * factor_T1).mul_(weight_H).to(x.dtype)
        return y_TH.view(x.shape), factor_T1
    y_TH = torch.empty_like(x_TH)
    for x_CH, factor_C1, y_CH in _chunks(x_TH, factor_T1, y_TH):
        y_CH.copy_((x_CH.to(kind) * factor_C1).mul_(weight_H))
    return y_TH.view(x.shape), factor_T1


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
        y, factor_T1 = _rms_norm(x, weight_H, epsilon)
        ctx.save_for_backward(x, weight_H, factor_T1)
        return y

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
