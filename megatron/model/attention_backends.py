"""Attention kernels behind one signature.

Shapes: B batch, N query heads, K key and value heads, S queries, T keys (T >= S when a cache
holds earlier positions), D head width.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

AttentionBackend = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]
"""(q_BNSD, k_BKTD, v_BKTD, mask, dropout probability) -> [B, N, S, D]. The mask is boolean,
broadcastable to [B, 1, S, T], True where a query sees a key; None means causal attention with the
last query at the last key."""


def sdpa(
    q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, mask: Tensor | None, dropout: float
) -> Tensor:
    """torch's scaled_dot_product_attention: flash or cuDNN kernels on GPUs, fused on CPU."""
    queries, keys = q_BNSD.shape[2], k_BKTD.shape[2]
    if mask is None and 1 < queries < keys:
        mask = causal_mask(queries, keys, q_BNSD.device)
    return F.scaled_dot_product_attention(
        q_BNSD,
        k_BKTD,
        v_BKTD,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None and queries > 1,
        enable_gqa=q_BNSD.shape[1] != k_BKTD.shape[1],
    )


def eager(
    q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, mask: Tensor | None, dropout: float
) -> Tensor:
    """The definition, in plain matrix products; the reference for the others."""
    groups = q_BNSD.shape[1] // k_BKTD.shape[1]
    k_BNTD = k_BKTD.repeat_interleave(groups, dim=1)
    v_BNTD = v_BKTD.repeat_interleave(groups, dim=1)
    scores_BNST = q_BNSD @ k_BNTD.transpose(-1, -2) / math.sqrt(q_BNSD.shape[-1])
    if mask is None:
        mask = causal_mask(q_BNSD.shape[2], k_BKTD.shape[2], q_BNSD.device)
    scores_BNST = scores_BNST.masked_fill(~mask, -torch.inf)
    weights_BNST = F.dropout(scores_BNST.softmax(-1), dropout, training=dropout > 0)
    return weights_BNST @ v_BNTD


def flash(
    q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, mask: Tensor | None, dropout: float
) -> Tensor:
    """The flash-attn package; sequences with a document mask go to :func:`sdpa`."""
    if mask is not None:
        return sdpa(q_BNSD, k_BKTD, v_BKTD, mask, dropout)
    from flash_attn import flash_attn_func

    q, k, v = (x.transpose(1, 2) for x in (q_BNSD, k_BKTD, v_BKTD))
    return flash_attn_func(q, k, v, dropout_p=dropout, causal=True).transpose(1, 2)


_BACKENDS: dict[str, AttentionBackend] = {"sdpa": sdpa, "eager": eager, "flash": flash}


def attention_backend(name: str) -> AttentionBackend:
    """The kernel that ``--attention-backend`` names.

    Raises:
        ValueError: the kernel's package is not installed.
    """
    if name == "flash" and importlib.util.find_spec("flash_attn") is None:
        raise ValueError(
            "--attention-backend flash needs the flash-attn package (pip install flash-attn); "
            "sdpa uses torch's own flash kernel"
        )
    return _BACKENDS[name]


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """bool [S, T]: the last query sees all keys, each earlier one a key less."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def document_mask(document_ids_BS: Tensor) -> Tensor:
    """bool [B, 1, S, S]: causal attention within equal document ids."""
    same_BSS = document_ids_BS[:, :, None] == document_ids_BS[:, None, :]
    length = document_ids_BS.shape[1]
    return (same_BSS & causal_mask(length, length, same_BSS.device)).unsqueeze(1)
