"""Attention kernels behind one signature.

Shapes: B batch, N query heads, K key and value heads, S queries, T keys (T >= S when a cache
holds earlier positions), D head width.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.config import ConfigError, ModelConfig
from megatron.model import blocked_attention
from megatron.model.attention_masks import AttentionMasks, alibi_slopes, causal_mask
from megatron.parallel.mesh import SINGLE, Group

AttentionKind = Literal["causal", "full", "cross"]
"""A token sees those up to itself, all of its sequence, or all of another sequence; of the last two
without padding."""


@dataclass(frozen=True)
class AttentionScoring:
    """How a block turns products of queries and keys into scores.

    A score is scale x product, then softcap x tanh(score / softcap), then -slope x distance.

    Attributes:
        scale: factor of the products; 1 / sqrt(D) without it.
        softcap: bound of the scores; None for no bound.
        window: keys that a query sees, itself included; None for all before it.
        slopes: ALiBi's slope of each of N heads; none without ALiBi.
        causal: whether a query sees no later keys.
    """

    scale: float | None = None
    softcap: float | None = None
    window: int | None = None
    slopes: tuple[float, ...] = ()
    causal: bool = True

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        layer: int,
        group: Group = SINGLE,
        kind: AttentionKind = "causal",
    ) -> AttentionScoring:
        """Those of block ``layer``, for the heads of one of the tensor-parallel ranks.

        Positions of two sequences have no distance: in cross-attention there is neither a window
        nor ALiBi.

        Raises:
            ConfigError: a window of earlier tokens where a token sees later ones too.
        """
        attention = config.attention
        scalar, window = attention.query_pre_attn_scalar, attention.window(layer)
        if kind == "full" and window is not None:
            raise ConfigError(
                f"--sliding-window {window} counts the tokens before one, but in the blocks of "
                "this model a token sees those after it too: leave it out"
            )
        slopes: tuple[float, ...] = ()
        if config.positions.position_embedding_type == "alibi" and kind != "cross":
            heads = attention.num_attention_heads // group.size
            first = group.rank * heads
            slopes = alibi_slopes(attention.num_attention_heads)[first : first + heads]
        return cls(
            scale=None if scalar == attention.kv_channels else 1 / math.sqrt(scalar),
            softcap=attention.attn_logit_softcapping,
            window=None if kind == "cross" else window,
            slopes=slopes,
            causal=kind == "causal",
        )


PLAIN = AttentionScoring()
"""Those of GPT-2 and Llama."""

AttentionBackend = Callable[
    [Tensor, Tensor, Tensor, AttentionScoring, AttentionMasks, float], Tensor
]
"""(q_BNSD, k_BKTD, v_BKTD, scores, masks, dropout probability) -> [B, N, S, D]. In causal attention
the last query is at the last key."""


def sdpa(
    q_BNSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    scores: AttentionScoring,
    masks: AttentionMasks,
    dropout: float,
) -> Tensor:
    """torch's scaled_dot_product_attention: flash or cuDNN kernels on GPUs, fused on CPU, where
    matrix products by blocks take the place of short sequences' kernel.

    It cannot bound scores; those go to :func:`eager`.
    """
    if scores.softcap is not None:
        return eager(q_BNSD, k_BKTD, v_BKTD, scores, masks, dropout)
    queries = q_BNSD.shape[2]
    if scores.window is not None and k_BKTD.shape[2] > scores.window + queries - 1:
        # Earlier keys are seen by none of the queries.
        seen = scores.window + queries - 1
        k_BKTD, v_BKTD = k_BKTD[:, :, -seen:], v_BKTD[:, :, -seen:]
    keys, mask = k_BKTD.shape[2], None
    causal = scores.causal
    visible = masks.visible(queries, keys, scores.window, q_BNSD.device, causal)
    if scores.slopes or visible is not None or (causal and 1 < queries < keys):
        # Made once in the dtype that the kernels need; a boolean mask they convert, and keep, in
        # every layer.
        mask = masks.bias(queries, keys, scores.window, scores.slopes, q_BNSD, causal)
    if mask is None and causal and not dropout and blocked_attention.suits(q_BNSD, k_BKTD):
        scale = 1 / math.sqrt(q_BNSD.shape[-1]) if scores.scale is None else scores.scale
        return blocked_attention.causal_attention(q_BNSD, k_BKTD, v_BKTD, scale)
    groups = q_BNSD.shape[1] // k_BKTD.shape[1]
    if mask is not None and groups > 1 and q_BNSD.device.type != "cpu":
        # Of torch's kernels for GPUs only cuDNN's takes a mask and groups of heads together, where
        # it is tried at all; else all scores would be written out, which copies of keys are not.
        k_BKTD, v_BKTD = (x.repeat_interleave(groups, dim=1) for x in (k_BKTD, v_BKTD))
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


def cudnn(
    q_BNSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    scores: AttentionScoring,
    masks: AttentionMasks,
    dropout: float,
) -> Tensor:
    """:func:`sdpa`, its copies of keys for masks with groups included, with cuDNN's kernel wherever
    that can, torch's other kernels where not."""
    with sdpa_kernel(_CUDNN_FIRST, set_priority=True):
        return sdpa(q_BNSD, k_BKTD, v_BKTD, scores, masks, dropout)


_CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def eager(
    q_BNSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    scores: AttentionScoring,
    masks: AttentionMasks,
    dropout: float,
) -> Tensor:
    """The definition, in plain matrix products; the reference for the others."""
    groups = q_BNSD.shape[1] // k_BKTD.shape[1]
    k_BNTD = k_BKTD.repeat_interleave(groups, dim=1)
    v_BNTD = v_BKTD.repeat_interleave(groups, dim=1)
    queries, keys, device = q_BNSD.shape[2], k_BKTD.shape[2], q_BNSD.device
    scale = 1 / math.sqrt(q_BNSD.shape[-1]) if scores.scale is None else scores.scale
    scores_BNST = q_BNSD @ k_BNTD.transpose(-1, -2) * scale
    if scores.softcap is not None:
        scores_BNST = scores.softcap * torch.tanh(scores_BNST / scores.softcap)
    if scores.slopes:
        biases = masks.bias(queries, keys, scores.window, scores.slopes, scores_BNST, scores.causal)
        scores_BNST = scores_BNST + biases
    else:
        visible = masks.visible(queries, keys, scores.window, device, scores.causal)
        if visible is None and scores.causal:
            visible = causal_mask(queries, keys, device)
        if visible is not None:
            scores_BNST = scores_BNST.masked_fill(~visible, -torch.inf)
    weights_BNST = F.dropout(scores_BNST.softmax(-1), dropout, training=dropout > 0)
    return weights_BNST @ v_BNTD


def flash(
    q_BNSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    scores: AttentionScoring,
    masks: AttentionMasks,
    dropout: float,
) -> Tensor:
    """The flash-attn package; documents, padding, ALiBi and bounded scores go to :func:`sdpa`."""
    unseen = masks.documents if scores.causal else masks.tokens
    if unseen is not None or scores.slopes or scores.softcap is not None:
        return sdpa(q_BNSD, k_BKTD, v_BKTD, scores, masks, dropout)
    from flash_attn import flash_attn_func

    # It counts the keys on the left of a query's own.
    left = -1 if scores.window is None else scores.window - 1
    q, k, v = (x.transpose(1, 2) for x in (q_BNSD, k_BKTD, v_BKTD))
    y = flash_attn_func(
        q,
        k,
        v,
        dropout_p=dropout,
        softmax_scale=scores.scale,
        causal=scores.causal,
        window_size=(left, 0 if left >= 0 else -1),
    )
    return y.transpose(1, 2)


_BACKENDS: dict[str, AttentionBackend] = {
    "sdpa": sdpa,
    "cudnn": cudnn,
    "eager": eager,
    "flash": flash,
}


def attention_backend(name: str) -> AttentionBackend:
    """The kernel that ``--attention-backend`` names.

    Raises:
        ValueError: the kernel's package is not installed, or there is no GPU for it.
    """
    if name == "cudnn" and not (torch.cuda.is_available() and torch.backends.cudnn.is_available()):
        raise ValueError(
            "--attention-backend cudnn needs an NVIDIA GPU and a torch that is built with cuDNN; "
            "sdpa uses what there is"
        )
    if name == "flash" and importlib.util.find_spec("flash_attn") is None:
        raise ValueError(
            "--attention-backend flash needs the flash-attn package (pip install flash-attn); "
            "sdpa uses torch's own flash kernel"
        )
    return _BACKENDS[name]
