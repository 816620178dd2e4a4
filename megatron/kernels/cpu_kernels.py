"""CPU kernels of attention and norms. GPUs use torch's.

- Attention in bfloat16, as GEMMs over blocks of queries. torch's fused kernel multiplies small
  tiles, which takes up to twice as long (benchmarks/RESULTS.md). A block of queries is multiplied
  with all keys at once or, in causal attention, with all keys up to the block's end. Scores and
  softmax are in float32, as in the fused kernel, the other GEMMs in bfloat16. The probabilities
  are saved for the backward pass, so this is meant for short sequences.
- torch's fused attention with attention sinks added.
- RMSNorm, for which torch needs a dozen passes over memory, in chunks of rows that fit into a
  core's caches.

Shapes: B batch, N query heads, K key and value heads, G = N / K query heads that share one, S
queries, T keys, D head width; X = B x K; Q queries of a block, P keys that they see. For RMSNorm: T
rows, C rows of a chunk, H width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 128
"""Number of queries per block in causal attention. Larger blocks compute more masked scores."""

WHOLE_BLOCK = 256
"""Number of queries per block if every query attends to all keys."""

CHUNK = 1 << 16
"""Number of elements in a chunk of rows, 256 KiB in float32."""


def suits(q_BNSD: Tensor, k_BKTD: Tensor, causal: bool = True) -> bool:
    """Return whether :func:`attention` supports these tensors. They must be bfloat16 on a CPU, and
    the probabilities at most twice as large as queries, keys, values and output together. Causal
    attention requires as many keys as queries."""
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
    """Compute softmax(scale q k^T + bias) v, [B, N, S, D], over all keys or, if causal, over the
    keys up to each query's position. The bias must have four dimensions that broadcast to [B, N, S,
    T], and may require a gradient. Sinks are one score per head that takes part in the softmax but
    has no value."""
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
        # This memory layout is the one that the output projection reads.
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
        # Saving the output costs no memory, because the projection saves it anyway.
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
    """Return the gradient of the sinks, [N]. A sink scales down all other weights equally."""
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
    """Compute :func:`attention` with sinks by torch's fused kernel, in any floating-point dtype.
    ``mask`` replaces the causal mask. It is added to the scores and has no gradient. A ``scale`` of
    None means 1 / sqrt(D)."""
    return _SinkAttention.apply(q_BNSD, k_BKTD, v_BKTD, sinks_N, scale, causal, mask)


class _SinkAttention(torch.autograd.Function):
    """Attention with sinks, computed by torch's fused kernel without sinks. The kernel also returns
    the log-sum-exp of each query's scores, to which the sink's score is added; the output is scaled
    accordingly. With these two, the kernel's backward pass computes the gradients with sinks: its
    weights are exp(score - log-sum-exp), and it uses the product of output and gradient."""

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
    """Add a block's gradients for the first keys to the sum in place, and return the sum. If there
    is only one block, ``sum_XTD`` is None, and its gradients are returned."""
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
    """Yield each block's (first query, end, number of keys) and float32 weights, sinks last."""
    queries_XGSD = _grouped(q_BNSD, k_BKTD.shape[1]).float() * scale
    keys_XTD, more = _flat(k_BKTD).float(), 0 if sinks_N is None else 1
    if sinks_N is not None:
        # An additional zero key makes room for the sink's score.
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
    """Return the scores of a block of ``count`` queries viewed as [B, N, Q, P]."""
    return scores_XQP.view(*q_BNSD.shape[:2], count, -1)


def _part(bias: Tensor, first: int, end: int, seen: int) -> Tensor:
    """Return a view of the bias for the scores of a block."""
    queries = slice(None) if bias.shape[2] == 1 else slice(first, end)
    return bias[:, :, queries, :seen]


def _blocks(queries: int, keys: int, causal: bool) -> list[tuple[int, int, int]]:
    """Return (first query, end, number of keys that the queries attend to) of each block."""
    size = BLOCK if causal else WHOLE_BLOCK
    ends = [(first, min(first + size, queries)) for first in range(0, queries, size)]
    return [(first, end, end if causal else keys) for first, end in ends]


def _flat(x_BKSD: Tensor) -> Tensor:
    return x_BKSD.flatten(0, 1).contiguous()


def _grouped(x_BNSD: Tensor, kv_heads: int) -> Tensor:
    return x_BNSD.unflatten(1, (kv_heads, -1)).flatten(0, 1).contiguous()


def rms_norm(x: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + epsilon) * weight over the last dimension, [..., H], in float32
    or wider (Zhang and Sennrich 2019, arXiv:1910.07467). The result has the dtype of ``x``."""
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x, weight_H, epsilon)
    return _rms_norm(x, weight_H, epsilon)[0]


def _rms_norm(x: Tensor, weight_H: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the normalised and weighted ``x``, and each row's factor 1 / sqrt(...), [T, 1]."""
    kind = torch.promote_types(x.dtype, torch.float32)
    x_TH, weight_H = x.reshape(-1, x.shape[-1]), weight_H.to(kind)
    factor_T1 = torch.linalg.vector_norm(x_TH, dim=-1, keepdim=True, dtype=kind)
    factor_T1.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
    if x.numel() <= CHUNK:
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
    rows = max(1, CHUNK // tensors[0].shape[-1])
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)
