"""Attention kernels with one signature.

Shapes: B batch, N query heads, K key and value heads, S queries, T keys (T >= S when a cache has
earlier positions), D head width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.blocks import Chunk
from megatron.model import cpu_kernels
from megatron.model.attention_flex import DTYPES as FLEX_DTYPES
from megatron.model.attention_flex import flex
from megatron.model.attention_masks import AttentionMasks, AttentionScoring, causal_mask
from megatron.model.torch_kernels import (
    CUDNN_FIRST,
    TORCHS_ORDER,
    KernelOrder,
    kernel_order,
    version_of_flash,
)

AttentionBackend = Callable[
    [
        Tensor, Tensor, Tensor, AttentionScoring, AttentionMasks, float, Tensor | None,
        Tensor | None,
    ],
    Tensor,
]  # fmt: skip
"""(q_BNSD, k_BKTD, v_BKTD, scores, masks, dropout probability, bias, sinks_N) -> [B, N, S, D]. In
causal attention the last query is at the last key. The bias is an addend of the scores,
broadcastable to [B, N, S, T], which has a gradient and contains the masks; None: masks and slopes
apply. A sink is one more score of each query of a head, whose weight multiplies nothing."""


def sdpa(
    q_BNSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    scores: AttentionScoring,
    masks: AttentionMasks,
    dropout: float,
    bias: Tensor | None = None,
    sinks_N: Tensor | None = None,
    order: KernelOrder = TORCHS_ORDER,
) -> Tensor:
    """torch's scaled_dot_product_attention: flash or cuDNN kernels on GPUs, fused on CPUs, where
    short sequences use our own kernel. With block masks it is FlexAttention; without them
    softcapped scores need :func:`eager`, as do sinks where torch's kernel for CPUs cannot have
    them. ``order`` is that of torch's kernels."""
    queries, causal = q_BNSD.shape[2], scores.causal
    if causal == masks.causal and not dropout and queries == k_BKTD.shape[2]:
        block_mask = masks.blocks.get(scores.window)
        if block_mask is not None and q_BNSD.dtype in FLEX_DTYPES:
            return flex(q_BNSD, k_BKTD, v_BKTD, scores, block_mask, sinks_N)
    no_sinks = dropout or q_BNSD.device.type != "cpu" or (bias is not None and bias.requires_grad)
    if scores.softcap is not None or (sinks_N is not None and no_sinks):
        return eager(q_BNSD, k_BKTD, v_BKTD, scores, masks, dropout, bias, sinks_N)
    window = scores.window if bias is None and causal else None
    if isinstance(window, int) and k_BKTD.shape[2] > window + queries - 1:
        # No query sees earlier keys.
        seen = window + queries - 1
        k_BKTD, v_BKTD = k_BKTD[:, :, -seen:], v_BKTD[:, :, -seen:]
    keys, mask = k_BKTD.shape[2], bias
    if mask is None:
        visible = masks.visible(queries, keys, scores.window, q_BNSD.device, causal)
        if scores.slopes or visible is not None or (causal and 1 < queries < keys):
            # Made once in the dtype that the kernels need; they would convert a boolean mask, and
            # keep the result, in every layer.
            mask = masks.bias(queries, keys, scores.window, scores.slopes, q_BNSD, causal)
    # A bias has minus infinity for later keys.
    triangle = causal and bias is None
    masked = triangle and mask is not None
    if not (dropout or masked) and cpu_kernels.suits(q_BNSD, k_BKTD, triangle):
        scale = 1 / math.sqrt(q_BNSD.shape[-1]) if scores.scale is None else scores.scale
        return cpu_kernels.attention(q_BNSD, k_BKTD, v_BKTD, scale, triangle, mask, sinks_N)
    if sinks_N is not None:
        whole = mask is None and causal and queries > 1
        return cpu_kernels.sink_attention(
            q_BNSD, k_BKTD, v_BKTD, sinks_N, scores.scale, whole, mask
        )
    groups = q_BNSD.shape[1] // k_BKTD.shape[1]
    if mask is not None and groups > 1 and q_BNSD.device.type != "cpu":
        # Of torch's kernels for GPUs only cuDNN's supports a mask with groups of heads; the others
        # would write out all scores, which takes more memory than copies of the keys.
        k_BKTD, v_BKTD = (x.repeat_interleave(groups, dim=1) for x in (k_BKTD, v_BKTD))
    learned = mask is not None and mask.requires_grad
    with order.during(q_BNSD.device, queries, keys, mask is not None, learned):
        return F.scaled_dot_product_attention(
            q_BNSD,
            k_BKTD,
            v_BKTD,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None and causal and queries > 1,
            scale=scores.scale,
            enable_gqa=q_BNSD.shape[1] != k_BKTD.shape[1],
        )


def eager(
    q_BNSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    scores: AttentionScoring,
    masks: AttentionMasks,
    dropout: float,
    bias: Tensor | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """The definition, in plain GEMMs; the reference for the others."""
    groups = q_BNSD.shape[1] // k_BKTD.shape[1]
    k_BNTD = k_BKTD.repeat_interleave(groups, dim=1)
    v_BNTD = v_BKTD.repeat_interleave(groups, dim=1)
    queries, keys, device = q_BNSD.shape[2], k_BKTD.shape[2], q_BNSD.device
    scale = 1 / math.sqrt(q_BNSD.shape[-1]) if scores.scale is None else scores.scale
    scores_BNST = q_BNSD @ k_BNTD.transpose(-1, -2) * scale
    if scores.softcap is not None:
        scores_BNST = scores.softcap * torch.tanh(scores_BNST / scores.softcap)
    if bias is not None:
        scores_BNST = scores_BNST + bias
    elif scores.slopes:
        biases = masks.bias(queries, keys, scores.window, scores.slopes, scores_BNST, scores.causal)
        scores_BNST = scores_BNST + biases
    else:
        visible = masks.visible(queries, keys, scores.window, device, scores.causal)
        if visible is None and scores.causal:
            visible = causal_mask(queries, keys, device)
        if visible is not None:
            scores_BNST = scores_BNST.masked_fill(~visible, -torch.inf)
    if sinks_N is None:
        weights_BNST = scores_BNST.softmax(-1)
    else:
        sinks_BNS1 = sinks_N.to(scores_BNST.dtype)[:, None, None].expand(*q_BNSD.shape[:3], 1)
        weights_BNST = torch.cat([scores_BNST, sinks_BNS1], -1).softmax(-1)[..., :-1]
    weights_BNST = F.dropout(weights_BNST, dropout, training=dropout > 0)
    return weights_BNST @ v_BNTD


def flash(
    q_BNSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    scores: AttentionScoring,
    masks: AttentionMasks,
    dropout: float,
    bias: Tensor | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """The flash-attn package, version 2; documents, padding, chunks, ALiBi, other biases,
    softcapped scores and sinks use :func:`sdpa`."""
    unseen = masks.document_ids if scores.causal == masks.causal else None
    if not scores.causal and unseen is None:
        unseen = masks.tokens
    plain = bias is None and unseen is None and not scores.slopes and scores.softcap is None
    plain = plain and not isinstance(scores.window, Chunk)
    if sinks_N is not None or not plain:
        return sdpa(q_BNSD, k_BKTD, v_BKTD, scores, masks, dropout, bias, sinks_N)
    from flash_attn import flash_attn_func

    # flash-attn counts the keys before a query's own, and those after it.
    left = right = -1
    if isinstance(scores.window, int):
        left, right = (scores.window - 1, 0) if scores.causal else (scores.window // 2,) * 2
    q, k, v = (x.transpose(1, 2) for x in (q_BNSD, k_BKTD, v_BKTD))
    y = flash_attn_func(
        q,
        k,
        v,
        dropout_p=dropout,
        softmax_scale=scores.scale,
        causal=scores.causal,
        window_size=(left, right),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return y.transpose(1, 2)


cudnn = partial(sdpa, order=KernelOrder(CUDNN_FIRST))
""":func:`sdpa` that prefers cuDNN's kernel to torch's others."""


def attention_backend(name: str, dropout: float = 0.0) -> AttentionBackend:
    """The kernel that ``--attention-backend`` names, for attention with dropout of this
    probability. Raises ConfigError if the kernel's package or a GPU for it is missing."""
    if name == "eager":
        return eager
    if name.startswith("flash"):
        version = version_of_flash(name, dropout)
        if version == 2:
            return flash
        name = f"flash{version}"
    order = kernel_order(name)
    return sdpa if order == TORCHS_ORDER else _with_order(order)


@functools.cache
def _with_order(order: KernelOrder) -> AttentionBackend:
    """One object for equal orders: code compiled for a block then serves all blocks with it."""
    return partial(sdpa, order=order)
