"""Attention kernels with one signature, and the masks of the keys that a query sees.

Causal attention sees the keys up to the query's own; full attention, and attention to another
sequence, all keys.

Shapes: B batch, N query heads, K key and value heads, S queries, T keys (T >= S when a cache has
earlier positions), D head width.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.config import ConfigError, ModelConfig
from megatron.model import cpu_kernels
from megatron.parallel.mesh import SINGLE, Group

AttentionKind = Literal["causal", "full", "cross"]
"""A token sees those up to itself, all of its sequence, or all of another sequence; of the last two
no padding."""


@dataclass(frozen=True)
class AttentionScoring:
    """How a block computes scores: scale x q k, then softcap x tanh(score / softcap), then less
    slope x distance.

    Attributes:
        scale: None for 1 / sqrt(D).
        window: keys that a query sees, its own included; None for all before it.
        slopes: ALiBi's slope of each of N heads; empty without ALiBi.
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
        """Those of block ``layer``, for the heads of a tensor-parallel rank. Cross-attention has
        neither a window nor ALiBi: positions of two sequences have no distance. Raises ConfigError
        for a window of earlier tokens where a token sees later ones too."""
        attention = config.attention
        scalar, window = attention.query_pre_attn_scalar, attention.window(layer)
        if kind == "full" and window is not None:
            raise ConfigError(
                f"--sliding-window {window} limits attention to earlier tokens, but in the blocks "
                "of this model a token also attends to later ones: leave the flag out"
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
"""The scoring of GPT-2 and Llama."""


class AttentionMasks:
    """The masks of one micro batch, made when a layer first needs them.

    Args:
        document_ids_BS: in causal attention a token sees those with its own id only; None for one
            document.
        padding_BT: bool, the keys that no query sees in attention that is not causal; None for no
            padding.
    """

    def __init__(
        self, document_ids_BS: Tensor | None = None, padding_BT: Tensor | None = None
    ) -> None:
        self.documents = None if document_ids_BS is None else document_mask(document_ids_BS)
        self.tokens = None if padding_BT is None else ~padding_BT[:, None, None, :]
        self._made: dict[tuple, Tensor] = {}

    def unmade(self) -> AttentionMasks:
        other = AttentionMasks()
        other.documents, other.tokens = self.documents, self.tokens
        return other

    def visible(
        self,
        queries: int,
        keys: int,
        window: int | None,
        device: torch.device,
        causal: bool = True,
    ) -> Tensor | None:
        """bool, broadcastable to [B, 1, S, T], True where a query sees a key; None for plain causal
        attention with the last query at the last key, or where a query sees all keys. ``queries``
        and ``keys`` are S and T."""
        if not causal:
            assert window is None
            return self.tokens
        assert self.documents is None or queries == keys
        if window is None or keys <= window:
            return self.documents

        def make() -> Tensor:
            mask = window_mask(queries, keys, window, device)
            return mask if self.documents is None else mask & self.documents

        return self._once(("window", queries, keys, window, device), make)

    def bias(
        self,
        queries: int,
        keys: int,
        window: int | None,
        slopes: tuple[float, ...],
        like: Tensor,
        causal: bool = True,
    ) -> Tensor:
        """Addend of the scores: -slope x distance with ALiBi, in both directions where attention is
        not causal, else 0; -infinity where a query does not see a key. Broadcastable to
        [B, N, S, T], with dtype and device of ``like``; the rest as for :meth:`visible`."""
        narrow = window is not None and keys > window

        def make() -> Tensor:
            visible = self.visible(queries, keys, window, like.device, causal)
            if visible is None and causal:
                visible = causal_mask(queries, keys, like.device)
            biases = torch.zeros((), device=like.device)
            if slopes:
                # Fused kernels on the CPU accept masks of two or four dimensions.
                biases = distance_biases(queries, keys, slopes, like.device).unsqueeze(0)
                biases = biases if causal else -biases.abs()
            if visible is not None:
                biases = biases.masked_fill(~visible, -torch.inf)
            return biases.to(like.dtype)

        width = window if narrow else None
        key = ("bias", queries, keys, width, slopes, like.dtype, like.device, causal)
        return self._once(key, make)

    def _once(self, key: tuple, make: Callable[[], Tensor]) -> Tensor:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """bool [S, T]: the last query sees all keys, each earlier one a key fewer."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def window_mask(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """bool [S, T]: causal, and only the last ``window`` keys of each query."""
    return causal_mask(queries, keys, device).triu(keys - queries - window + 1)


def document_mask(document_ids_BS: Tensor) -> Tensor:
    """bool [B, 1, S, S]: causal attention within equal document ids."""
    same_BSS = document_ids_BS[:, :, None] == document_ids_BS[:, None, :]
    length = document_ids_BS.shape[1]
    return (same_BSS & causal_mask(length, length, same_BSS.device)).unsqueeze(1)


def distance_biases(
    queries: int, keys: int, slopes: tuple[float, ...], device: torch.device
) -> Tensor:
    """float32 [N, S, T]: -slope x (query position - key position), last query at the last key."""
    places_T = torch.arange(keys, device=device, dtype=torch.float32)
    distances_ST = places_T[keys - queries :, None] - places_T
    # Filled in on the device: copying a list to a GPU would synchronize with it.
    slopes_N = torch.stack([torch.full((), -slope, device=device) for slope in slopes])
    return slopes_N[:, None, None] * distances_ST


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Slope of each head (Press et al. 2021, arXiv:2108.12409): 2^(-8 n / heads), n from 1; for
    other numbers than powers of two as in the authors' code."""
    lower = 2 ** (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * n / lower) for n in range(1, lower + 1)]
    between = [2.0 ** (-8 * n / (2 * lower)) for n in range(1, 2 * lower + 1, 2)]
    return (*slopes, *between[: heads - lower])


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
    """torch's scaled_dot_product_attention: flash or cuDNN kernels on GPUs, fused on CPUs, where
    short sequences use our own kernel. Softcapped scores need :func:`eager`."""
    if scores.softcap is not None:
        return eager(q_BNSD, k_BKTD, v_BKTD, scores, masks, dropout)
    queries = q_BNSD.shape[2]
    if scores.window is not None and k_BKTD.shape[2] > scores.window + queries - 1:
        # No query sees earlier keys.
        seen = scores.window + queries - 1
        k_BKTD, v_BKTD = k_BKTD[:, :, -seen:], v_BKTD[:, :, -seen:]
    keys, mask = k_BKTD.shape[2], None
    causal = scores.causal
    visible = masks.visible(queries, keys, scores.window, q_BNSD.device, causal)
    if scores.slopes or visible is not None or (causal and 1 < queries < keys):
        # Made once in the dtype that the kernels need; they would convert a boolean mask, and keep
        # the result, in every layer.
        mask = masks.bias(queries, keys, scores.window, scores.slopes, q_BNSD, causal)
    if mask is None and causal and not dropout and cpu_kernels.suits(q_BNSD, k_BKTD):
        scale = 1 / math.sqrt(q_BNSD.shape[-1]) if scores.scale is None else scores.scale
        return cpu_kernels.causal_attention(q_BNSD, k_BKTD, v_BKTD, scale)
    groups = q_BNSD.shape[1] // k_BKTD.shape[1]
    if mask is not None and groups > 1 and q_BNSD.device.type != "cpu":
        # Of torch's kernels for GPUs only cuDNN's supports a mask with groups of heads; the others
        # would write out all scores, which takes more memory than copies of the keys.
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


_CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def cudnn(*inputs: Any) -> Tensor:
    """:func:`sdpa` that prefers cuDNN's kernel to torch's others."""
    with sdpa_kernel(_CUDNN_FIRST, set_priority=True):
        return sdpa(*inputs)


def eager(
    q_BNSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    scores: AttentionScoring,
    masks: AttentionMasks,
    dropout: float,
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
    """The flash-attn package; documents, padding, ALiBi and softcapped scores use :func:`sdpa`."""
    unseen = masks.documents if scores.causal else masks.tokens
    if unseen is not None or scores.slopes or scores.softcap is not None:
        return sdpa(q_BNSD, k_BKTD, v_BKTD, scores, masks, dropout)
    from flash_attn import flash_attn_func

    # flash-attn counts the keys before a query's own.
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
    """The kernel that ``--attention-backend`` names. Raises ValueError if the kernel's package or a
    GPU for it is missing."""
    if name == "cudnn" and not (torch.cuda.is_available() and torch.backends.cudnn.is_available()):
        raise ValueError(
            "--attention-backend cudnn needs an NVIDIA GPU and a torch that is built with cuDNN; "
            "sdpa uses the kernels that are available"
        )
    if name == "flash" and importlib.util.find_spec("flash_attn") is None:
        raise ValueError(
            "--attention-backend flash needs the flash-attn package (pip install flash-attn); "
            "sdpa uses torch's own flash kernel"
        )
    return _BACKENDS[name]
