"""Attention kernels that share one signature.

Shapes: B batch, N query heads, K key and value heads, S queries, T keys (T >= S when a cache has
earlier positions), D head width.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.config import ConfigError
from megatron.config.features import taking_part
from megatron.kernels import cpu_kernels
from megatron.model.attention_flex import DTYPES as FLEX_DTYPES
from megatron.model.attention_flex import flex
from megatron.model.attention_masks import AttentionMasks, AttentionScoring, causal_mask

CUDNN_BLOCK = 128
WITHOUT_CUDNN = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
"""torch's kernels other than cuDNN's, in torch's order of preference."""


class KernelOrder(NamedTuple):
    """Order in which torch tries its attention kernels.

    Attributes:
        kernels: kernels to try, the preferred one first; empty for torch's own order.
        any_length: whether cuDNN's results are correct for all sequence lengths.
    """

    kernels: tuple[SDPBackend, ...] = ()
    any_length: bool = True

    def during(
        self,
        device: torch.device,
        queries: int,
        keys: int,
        masked: bool,
        learned: bool = False,
    ) -> AbstractContextManager[object]:
        """Return a context manager that applies the order. Unlike a process-wide order, it also
        works in compiled code, because it is part of the key of torch's compile cache.

        cuDNN is excluded where its results may be wrong: for lengths that are not multiples of its
        block size, in old versions, and in all versions with a dense mask, whose gradient may be
        NaN (pytorch issue 196678). It is also excluded if the mask is ``learned``: torch would
        choose cuDNN and fail, as it does not compute the mask's gradient.
        """
        whole = queries % CUDNN_BLOCK == 0 and keys % CUDNN_BLOCK == 0
        wrong = not whole and (masked or not self.any_length)
        if device.type == "cuda" and (wrong or learned):
            kernels = self.kernels or WITHOUT_CUDNN
            return sdpa_kernel(
                [each for each in kernels if each in WITHOUT_CUDNN], set_priority=True
            )
        if not self.kernels:
            return contextlib.nullcontext()
        return sdpa_kernel(list(self.kernels), set_priority=True)


TORCHS_ORDER = KernelOrder()


AttentionBackend = Callable[
    [
        Tensor, Tensor, Tensor, AttentionScoring, AttentionMasks, float, Tensor | None,
        Tensor | None,
    ],
    Tensor,
]  # fmt: skip
"""Signature of an attention kernel: (q_BNSD, k_BKTD, v_BKTD, scores, masks, dropout probability,
bias, sinks_N) -> [B, N, S, D]. In causal attention the last query is aligned with the last key. The
bias is differentiable, broadcastable to [B, N, S, T], added to the scores, and includes the masks.
If it is None, masks and ALiBi slopes apply. A sink is an extra score per query without a value."""


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
    """Attend with torch's scaled_dot_product_attention: flash or cuDNN kernels on GPUs, a fused
    kernel on CPUs, where our own handles short sequences. FlexAttention is used if there is a block
    mask. Otherwise softcapped scores fall back to :func:`eager`, as do sinks if no fused kernel
    supports them. ``order`` is the order in which torch tries its kernels."""
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
        # Earlier keys are outside the window of every query.
        seen = window + queries - 1
        k_BKTD, v_BKTD = k_BKTD[:, :, -seen:], v_BKTD[:, :, -seen:]
    keys, mask = k_BKTD.shape[2], bias
    if mask is None:
        visible = masks.visible(queries, keys, scores.window, q_BNSD.device, causal)
        if scores.slopes or visible is not None or (causal and 1 < queries < keys):
            # Created once in the kernels' dtype: given a boolean mask, every layer would create and
            # keep a converted copy.
            mask = masks.bias(queries, keys, scores.window, scores.slopes, q_BNSD, causal)
    # A bias already sets the scores of later keys to minus infinity.
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
        # Among torch's GPU kernels, only cuDNN's supports a mask with grouped heads. The others
        # would materialise all scores, which takes more memory than repeating the keys and values.
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
    """Compute attention by its definition with plain GEMMs. Reference for the other kernels."""
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


def attention_backend(name: str, dropout: float = 0.0) -> AttentionBackend:
    """Return the kernel selected by ``--attention-backend`` for a dropout probability. Raises
    ConfigError if the kernel's package or a suitable GPU is missing."""
    if name == "eager":
        return eager
    kernels = (feature.attention_kernel(name, dropout) for feature in taking_part())
    kernel: AttentionBackend | None = next(filter(None, kernels), None)
    if kernel is None and name != "sdpa":
        raise ConfigError(
            f"--attention-backend {name}: this kernel is a feature whose folder is missing here; "
            "use sdpa or eager"
        )
    return kernel or sdpa
