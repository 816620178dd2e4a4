"""Attention scoring and masks: how a block scores keys, and which keys a query sees.

In causal attention a query sees the keys up to its own position. In full attention and in
cross-attention it sees all keys.

Shapes: B batch, N query heads, S queries, T keys (T >= S if a KV cache has earlier positions).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron.config import ModelConfig
from megatron.config.blocks import Chunk, Window
from megatron.parallel.mesh import SINGLE, Group

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

P = ParamSpec("P")
T = TypeVar("T")
Place = TypeVar("Place", int, Tensor, np.ndarray)
_FAKE = torch._C._TorchDispatchModeKey.FAKE

_EARLY = 8192
"""Longest sequence whose document mask is created before a layer needs it: 64 MiB per sample."""

AttentionKind = Literal["causal", "full", "cross"]
"""Tokens that a token attends to. causal: those up to itself; full: its whole sequence; cross: the
encoder's sequence. In full and cross attention, padding is excluded."""


@dataclass(frozen=True)
class AttentionScoring:
    """Scoring of a block's attention: scale x q k, then softcap x tanh(score / softcap), then minus
    slope x distance.

    Attributes:
        scale: factor of q k; None for 1 / sqrt(D).
        window: number of keys that a query sees, including its own (if not causal: keys at most
            half of this away), or its :class:`Chunk`; None for all keys.
        slopes: ALiBi slope of each of N heads; empty without ALiBi.
    """

    scale: float | None = None
    softcap: float | None = None
    window: Window = None
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
        """Return the scoring of block ``layer`` for a tensor-parallel rank's heads. Cross-attention
        has no windows and no ALiBi: distances between two sequences are undefined."""
        attention = config.attention
        scalar, window = attention.query_pre_attn_scalar, attention.window(layer)
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
"""Scoring without softcap, windows and ALiBi, as in GPT-2 and Llama."""


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return the ALiBi slope of each head (Press et al. 2021, arXiv:2108.12409): 2^(-8 n / heads)
    for n = 1, 2, ... If ``heads`` is not a power of two, follow the authors' code."""
    lower = 2 ** (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * n / lower) for n in range(1, lower + 1)]
    between = [2.0 ** (-8 * n / (2 * lower)) for n in range(1, 2 * lower + 1, 2)]
    return (*slopes, *between[: heads - lower])


def tensor_cache(size: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that caches a function's last ``size`` results by its hashable arguments.
    Cached tensors outlive the call, so they are never inference tensors. Tensors without values,
    created under torch's fake mode, are not cached."""

    def decorate(compute: Callable[P, T]) -> Callable[P, T]:
        def computed(*arguments: P.args, **names: P.kwargs) -> T:
            with torch.inference_mode(False), torch.no_grad():
                return compute(*arguments, **names)

        kept: Callable[P, T] = functools.lru_cache(size)(computed)  # type: ignore[assignment]

        @functools.wraps(compute)
        def cached(*arguments: P.args, **names: P.kwargs) -> T:
            # A traced graph must contain the computation.
            if torch.compiler.is_dynamo_compiling() or torch._C._get_dispatch_mode(_FAKE):
                return computed(*arguments, **names)
            return kept(*arguments, **names)

        return cached

    return decorate


@tensor_cache(8)
def slopes_on(
    slopes: tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the slopes as a tensor [N]. Cached by device and dtype."""
    # Filled on the device: copying a list to a GPU would synchronize with it.
    return torch.stack([torch.full((), slope, device=device, dtype=dtype) for slope in slopes])


class AttentionMasks:
    """Masks of one micro batch, each created when a layer first needs it.

    Args:
        document_ids_BS: in self-attention, a token sees only tokens with its own id. None if each
            sample is one document.
        padding_BT: bool, True for padding keys, which no query sees in attention that is not
            causal; None for no padding. Windows need ``document_ids_BS`` with a separate id for
            padding: otherwise a window that contains only padding would have no visible key.
        blocks: block masks of :mod:`attention_flex` by window, used instead of dense masks in
            self-attention without dropout.
        causal: whether attention within documents is causal.
    """

    def __init__(
        self,
        document_ids_BS: Tensor | None = None,
        padding_BT: Tensor | None = None,
        blocks: Mapping[Window, BlockMask] | None = None,
        causal: bool = True,
    ) -> None:
        self.document_ids, self.causal = document_ids_BS, causal
        self.tokens = None if padding_BT is None else ~padding_BT[:, None, None, :]
        self.blocks = blocks or {}
        self._documents: Tensor | None = None
        if document_ids_BS is not None and not self.blocks and len(document_ids_BS[0]) <= _EARLY:
            # Created here, not in a layer, so that it exists before compiled layers run.
            self._documents = document_mask(document_ids_BS, causal)
        self._made: dict[Hashable, Any] = {}

    @property
    def documents(self) -> Tensor | None:
        """Mask of attention within documents, bool [B, 1, S, S]; None without document ids."""
        if self._documents is not None or self.document_ids is None:
            return self._documents
        ids_BS, causal = self.document_ids, self.causal
        return self.once(("documents",), lambda: document_mask(ids_BS, causal))

    def unmade(self) -> AttentionMasks:
        """Return a copy without the masks that layers have created."""
        other = AttentionMasks()
        other.document_ids, other._documents = self.document_ids, self._documents
        other.tokens, other.blocks, other.causal = self.tokens, self.blocks, self.causal
        return other

    def visible(
        self,
        queries: int,
        keys: int,
        window: Window,
        device: torch.device,
        causal: bool = True,
    ) -> Tensor | None:
        """Return a bool mask, broadcastable to [B, 1, S, T], True where a query sees a key. None
        means plain causal attention with the last query aligned with the last key, or, if not
        ``causal``, that every query sees all keys. ``queries`` and ``keys`` are S and T."""
        seen = self.documents if causal == self.causal else None
        assert seen is None or queries == keys
        if not causal and seen is None:
            seen = self.tokens
            assert seen is None or not narrows(window, keys, causal)
        if not narrows(window, keys, causal):
            return seen

        def make() -> Tensor:
            assert window is not None
            mask = window_mask(queries, keys, window, device, causal)
            # Our CPU kernel needs four dimensions if attention is not causal.
            mask = mask if causal else mask[None, None]
            return mask if seen is None else mask & seen

        return self.once(("window", queries, keys, window, device, causal), make)

    def bias(
        self,
        queries: int,
        keys: int,
        window: Window,
        slopes: tuple[float, ...],
        like: Tensor,
        causal: bool = True,
    ) -> Tensor:
        """Return the bias added to the scores: -infinity where a query does not see a key, else
        -slope x distance with ALiBi (symmetric if not causal) or 0. Broadcastable to [B, N, S, T],
        with the dtype and device of ``like``. The other arguments are as in :meth:`visible`."""

        def make() -> Tensor:
            visible = self.visible(queries, keys, window, like.device, causal)
            if visible is None and causal:
                visible = causal_mask(queries, keys, like.device)
            biases = torch.zeros((), device=like.device)
            if slopes:
                # Fused CPU kernels accept masks of two or four dimensions.
                dtype = torch.promote_types(like.dtype, torch.float32)
                biases = distance_biases(queries, keys, slopes, like.device, dtype).unsqueeze(0)
                biases = biases if causal else -biases.abs()
            if visible is not None:
                biases = biases.masked_fill(~visible, -torch.inf)
            return biases.to(like.dtype)

        width = window if narrows(window, keys, causal) else None
        only_padding = not (causal or slopes or width) and self.document_ids is None
        if only_padding and torch.compiler.is_compiling():
            # One row per sample is cheap, but a cached mask would require another compiled graph.
            return make()
        key = ("bias", queries, keys, width, slopes, like.dtype, like.device, causal)
        return self.once(key, make)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return ``make()``, cached by ``key``."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def narrows(window: Window, keys: int, causal: bool = True) -> bool:
    """Return whether a window hides any of ``keys`` keys."""
    if isinstance(window, Chunk):
        return keys > window.size
    return window is not None and keys > (window if causal else window // 2 + 1)


def first_key(query: Place, window: int | Chunk, causal: bool = True) -> Place:
    """Return the first position in a query's window, which may be before the sequence."""
    if isinstance(window, Chunk):
        return query // window.size * window.size
    return query - (window - 1 if causal else window // 2)


def last_key(query: Place, window: int | Chunk, causal: bool = True) -> Place:
    """Return the last position in a query's window, which may be after the sequence."""
    if causal:
        return query
    if isinstance(window, Chunk):
        return (query // window.size + 1) * window.size - 1
    return query + window // 2


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return a bool [S, T] mask: the last query sees all keys, each earlier query one key fewer."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def window_mask(
    queries: int, keys: int, window: int | Chunk, device: torch.device, causal: bool = True
) -> Tensor:
    """Return a bool [S, T] mask of a window: each query's last ``window`` keys if causal, else keys
    at most ``window // 2`` away, as in flash-attention and ModernBERT; or the query's own chunk."""
    if isinstance(window, Chunk):
        chunks_T = torch.arange(keys, device=device) // window.size
        same_ST = chunks_T[keys - queries :, None] == chunks_T
        return same_ST & causal_mask(queries, keys, device) if causal else same_ST
    if not causal:
        ones = torch.ones(queries, keys, dtype=torch.bool, device=device)
        return ones.tril(window // 2).triu(-(window // 2))
    return causal_mask(queries, keys, device).triu(keys - queries - window + 1)


def document_mask(document_ids_BS: Tensor, causal: bool = True) -> Tensor:
    """Return a bool [B, 1, S, S] mask that is True between tokens with equal document ids."""
    same_BSS = document_ids_BS[:, :, None] == document_ids_BS[:, None, :]
    if not causal:
        return same_BSS.unsqueeze(1)
    length = document_ids_BS.shape[1]
    return (same_BSS & causal_mask(length, length, same_BSS.device)).unsqueeze(1)


def distance_biases(
    queries: int,
    keys: int,
    slopes: tuple[float, ...],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return -slope x (query position - key position), [N, S, T]. The last query is aligned with
    the last key."""
    places_T = torch.arange(keys, device=device, dtype=dtype)
    distances_ST = places_T[keys - queries :, None] - places_T
    return -slopes_on(slopes, device, dtype)[:, None, None] * distances_ST
