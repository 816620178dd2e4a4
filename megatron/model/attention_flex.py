"""FlexAttention: one fused GPU kernel for documents, windows, softcap, ALiBi and sinks.

torch generates the kernel from functions that modify a score given its position. Instead of a
dense mask, the kernel reads a block mask: for each block of queries, the blocks of keys that are
fully, partly, or not visible. Invisible blocks are skipped.

Shapes: B batch, N query heads, K key and value heads, S sequence, D head width, Q = S / 128
blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.config import ModelConfig
from megatron.config.blocks import Window
from megatron.kernels.compiler import allow_graphs, missing_compiler
from megatron.model.attention_masks import AttentionScoring, first_key, last_key, narrows, slopes_on

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Positions per block."""

DEVICES = ("cuda",)
"""Device types for which torch generates the kernel and its gradient."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that Triton can multiply. float64 is used only to compare results."""

_MOST_LENGTHS = 64

SMALLEST_HEAD = 16
"""Smallest head width for which Triton has a matrix product."""


def block_masks(
    config: ModelConfig, tokens_BS: Tensor, document_ids_BS: Tensor | None, causal: bool = True
) -> dict[Window, BlockMask]:
    """Return a micro batch's block masks by window, for the windows of the model for which torch's
    other kernels would need a dense mask or dense scores; with sinks, for all windows. ``causal``
    applies to all blocks. Empty if FlexAttention is not used (:func:`why_not_flex`)."""
    device, length = tokens_BS.device, tokens_BS.shape[1]
    if device.type not in DEVICES:
        return {}
    everywhere = document_ids_BS is not None or config.attention.softmax_type != "vanilla"
    windows = flex_windows(config, length, everywhere, causal)
    if not windows or why_not_flex(config, device.type) is not None:
        return {}
    return {
        window: block_mask(length, window, document_ids_BS, device, causal) for window in windows
    }


def flex_windows(
    config: ModelConfig, length: int, documents: bool, causal: bool = True
) -> set[Window]:
    """Return the windows of the blocks whose attention is not plain causal (or plain full)
    attention. The element None stands for blocks without a window."""
    attention = config.attention
    everywhere = (
        documents
        or attention.attn_logit_softcapping is not None
        or config.positions.position_embedding_type == "alibi"
    )
    windows = {attention.window(layer) for layer in range(config.num_layers)}
    if everywhere:
        return windows
    return {window for window in windows if narrows(window, length, causal)}


def why_not_flex(config: ModelConfig, device_type: str) -> str | None:
    """Return the reason why FlexAttention is not used on a device type, or None if it is used."""
    attention = config.attention
    if device_type not in DEVICES:
        return "FlexAttention is for GPUs"
    if attention.attention_backend == "eager":
        return "--attention-backend eager"
    if attention.attention_dropout:
        return f"FlexAttention has no --attention-dropout ({attention.attention_dropout})"
    if attention.kv_channels < SMALLEST_HEAD:
        return f"FlexAttention needs --kv-channels {SMALLEST_HEAD} or more"
    missing = missing_compiler(device_type)
    return None if missing is None else f"FlexAttention needs a compiler: {missing}"


def block_mask(
    length: int,
    window: Window,
    document_ids_BS: Tensor | None,
    device: torch.device,
    causal: bool = True,
) -> BlockMask:
    """Return the block mask of a ``window`` (see :class:`AttentionScoring`) within documents. No
    [S, S] tensor is created: each block's first and last position, and its smallest and largest
    document id, decide which blocks are visible. The CPU does not synchronize with the GPU."""
    from torch.nn.attention.flex_attention import BlockMask

    count = -(-length // BLOCK)
    first_Q = torch.arange(count, device=device) * BLOCK
    last_Q = first_Q + (BLOCK - 1)
    first, last = first_Q[:, None], last_Q[:, None]  # of query blocks

    def seen_from(query: Tensor) -> Tensor:
        return query * 0 if window is None else first_key(query, window, causal)

    def seen_to(query: Tensor) -> Tensor:
        whole_row = window is None and not causal
        return query * 0 + length if whole_row else last_key(query, window or 1, causal)

    some = (first_Q <= seen_to(last)) & (last_Q >= seen_from(first))
    # The last block is not fully visible if it is partial: it has positions beyond the sequence.
    whole = (last_Q < length) & (last < length)
    whole = whole & (last_Q <= seen_to(first)) & (first_Q >= seen_from(last))
    some, whole = some[None, None], whole[None, None]
    ids_BS = None if document_ids_BS is None else document_ids_BS.to(torch.int32)
    if ids_BS is not None:
        places = torch.arange(count * BLOCK, device=device).clamp(max=length - 1)
        low_BQ, high_BQ = ids_BS[:, places].unflatten(1, (count, BLOCK)).aminmax(dim=2)
        low, high = low_BQ[:, None, :, None], high_BQ[:, None, :, None]  # of query blocks
        low_of_keys, high_of_keys = low.mT, high.mT
        some = some & (low <= high_of_keys) & (low_of_keys <= high)
        whole = whole & (low == high_of_keys) & (low_of_keys == high)
    some = some & ~whole

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = key <= seen_to(query)
        if window is not None:
            seen = seen & (key >= seen_from(query))
        if ids_BS is not None:
            seen = seen & (ids_BS[batch, query] == ids_BS[batch, key])
        return seen

    (keys, key_blocks), (whole_keys, whole_key_blocks) = _ordered(some), _ordered(whole)
    (queries, query_blocks), (whole_queries, whole_query_blocks) = (
        _ordered(some.mT),
        _ordered(whole.mT),
    )
    return BlockMask(
        seq_lengths=(length, length),
        kv_num_blocks=keys,
        kv_indices=key_blocks,
        full_kv_num_blocks=whole_keys,
        full_kv_indices=whole_key_blocks,
        q_num_blocks=queries,
        q_indices=query_blocks,
        full_q_num_blocks=whole_queries,
        full_q_indices=whole_query_blocks,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=visible,
    )


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Sort each row of a bool [B, 1, Q, Q]. Return the number of True entries, int32 [B, 1, Q], and
    the column indices, int32 [B, 1, Q, Q]: those of True entries first, each group ascending."""
    order = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
    # The kernels expect contiguous rows, but argsort keeps the strides of a transposed tensor.
    order = order.to(torch.int32, memory_format=torch.contiguous_format)
    return chosen.sum(-1, dtype=torch.int32), order


def flex(
    q_BNSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    scores: AttentionScoring,
    mask: BlockMask,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Attend to the keys that ``mask`` shows, with softcap, ALiBi and sinks. Returns [B, N, S, D].
    The kernel is compiled with the surrounding code if that is compiled, otherwise on its own."""
    attend = _uncompiled() if torch.compiler.is_compiling() else _compiled()
    attend = partial(
        attend,
        q_BNSD,
        k_BKSD,
        v_BKSD,
        score_mod=_score(scores, q_BNSD.device),
        block_mask=mask,
        scale=scores.scale,
        enable_gqa=q_BNSD.shape[1] != k_BKSD.shape[1],
    )
    if sinks_N is None:
        return attend()
    from torch.nn.attention.flex_attention import AuxRequest

    y_BNSD, aux = attend(return_aux=AuxRequest(lse=True))
    # Fraction of the softmax's denominator that belongs to the keys, not to the sink.
    shares_BNS = torch.sigmoid(aux.lse - sinks_N.to(aux.lse.dtype)[:, None])
    return (y_BNSD * shares_BNS[..., None]).to(y_BNSD.dtype)


def _score(scores: AttentionScoring, device: torch.device) -> Callable[..., Tensor] | None:
    softcap = scores.softcap
    if not scores.slopes:
        if softcap is None:
            return None

        def capped(score: Tensor, batch: Any, head: Any, query: Any, key: Any) -> Tensor:
            return softcap * torch.tanh(score / softcap)

        return capped
    slopes_N = slopes_on(scores.slopes, device)

    def biased(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        distance = query - key
        return score - slopes_N[head] * (distance if scores.causal else distance.abs())

    return biased


def _uncompiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@functools.cache
def _compiled() -> Callable[..., Any]:
    # Compiled once per sequence length, like blocks. Beyond torch's recompilation limit,
    # FlexAttention would run uncompiled and materialise all scores.
    allow_graphs(_MOST_LENGTHS)
    return torch.compile(_uncompiled(), dynamic=False)
