"""Scores of keys in the blocks of a model, and the keys that a query sees.

Causal attention sees the keys up to the query's own; full attention, and attention to another
sequence, all keys.

Shapes: B batch, N query heads, S queries, T keys (T >= S when a cache has earlier positions).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, TypeVar

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
"""Tokens up to which the mask of documents is made before a layer needs it: 64 MiB a sample."""

AttentionKind = Literal["causal", "full", "cross"]
"""A token attends to the tokens up to itself, to its whole sequence, or to another whole sequence.
The last two exclude padding."""


@dataclass(frozen=True)
class AttentionScoring:
    """Computation of scores in a block: scale x q k, then softcap x tanh(score / softcap), then
    less slope x distance.

    Attributes:
        scale: None for 1 / sqrt(D).
        window: keys that a query sees, its own included; in attention that is not causal those at
            most half as many places away; or those of its chunk; None for all.
        slopes: ALiBi's slope of each of N heads; empty without ALiBi.
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
        """Return the scoring of block ``layer``, for the heads of a tensor-parallel rank.
        Cross-attention has neither a window nor ALiBi: positions of two sequences have no
        distance."""
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
"""The scoring of GPT-2 and Llama."""


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Slope of each head (Press et al. 2021, arXiv:2108.12409): 2^(-8 n / heads), n from 1; for
    other numbers than powers of two as in the authors' code."""
    lower = 2 ** (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * n / lower) for n in range(1, lower + 1)]
    between = [2.0 ** (-8 * n / (2 * lower)) for n in range(1, 2 * lower + 1, 2)]
    return (*slopes, *between[: heads - lower])


def tensor_cache(size: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator of a function of hashable arguments whose last ``size`` results are kept. Its
    tensors outlive the call: they are no inference tensors, and those without values, of a call
    under torch's fake mode, are not kept."""

    def decorate(compute: Callable[P, T]) -> Callable[P, T]:
        def computed(*arguments: P.args, **names: P.kwargs) -> T:
            with torch.inference_mode(False), torch.no_grad():
                return compute(*arguments, **names)

        kept: Callable[P, T] = functools.lru_cache(size)(computed)  # type: ignore[assignment]

        @functools.wraps(compute)
        def cached(*arguments: P.args, **names: P.kwargs) -> T:
            # A graph that torch traces computes for itself.
            if torch.compiler.is_dynamo_compiling() or torch._C._get_dispatch_mode(_FAKE):
                return computed(*arguments, **names)
            return kept(*arguments, **names)

        return cached

    return decorate


@tensor_cache(8)
def slopes_on(
    slopes: tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """[N], made once for a device."""
    # Filled in on the device: copying a list to a GPU would synchronize with it.
    return torch.stack([torch.full((), slope, device=device, dtype=dtype) for slope in slopes])


class AttentionMasks:
    """The masks of one micro batch, made when a layer first needs them.

    Args:
        document_ids_BS: in the model's attention to its own sequence a token sees those with its
            own id only; None for one document.
        padding_BT: bool, the keys that no query sees in attention that is not causal; None for no
            padding. Not with windows and without documents: a window of padding has no key. Padding
            that is a document of its own sees itself.
        blocks: by window, what :mod:`attention_flex` needs instead of dense masks; attention within
            documents, without dropout, uses it where it is there.
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
            # Here and not in a layer: code compiled for layers finds it.
            self._documents = document_mask(document_ids_BS, causal)
        self._made: dict[Hashable, Any] = {}

    @property
    def documents(self) -> Tensor | None:
        """bool [B, 1, S, S], attention within documents; None for one document."""
        if self._documents is not None or self.document_ids is None:
            return self._documents
        ids_BS, causal = self.document_ids, self.causal
        return self.once(("documents",), lambda: document_mask(ids_BS, causal))

    def unmade(self) -> AttentionMasks:
        """The same without what layers made."""
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
        """bool, broadcastable to [B, 1, S, T], True where a query sees a key; None for plain causal
        attention with the last query at the last key, or where a query sees all keys. ``queries``
        and ``keys`` are S and T."""
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
            # Our kernel on the CPU, for attention that is not causal, needs four dimensions.
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
        """Addend of the scores: -slope x distance with ALiBi, in both directions where attention is
        not causal, else 0; -infinity where a query does not see a key. Broadcastable to
        [B, N, S, T], with dtype and device of ``like``; the rest as for :meth:`visible`."""

        def make() -> Tensor:
            visible = self.visible(queries, keys, window, like.device, causal)
            if visible is None and causal:
                visible = causal_mask(queries, keys, like.device)
            biases = torch.zeros((), device=like.device)
            if slopes:
                # Fused kernels on the CPU accept masks of two or four dimensions.
                dtype = torch.promote_types(like.dtype, torch.float32)
                biases = distance_biases(queries, keys, slopes, like.device, dtype).unsqueeze(0)
                biases = biases if causal else -biases.abs()
            if visible is not None:
                biases = biases.masked_fill(~visible, -torch.inf)
            return biases.to(like.dtype)

        width = window if narrows(window, keys, causal) else None
        only_padding = not (causal or slopes or width) and self.document_ids is None
        if only_padding and torch.compiler.is_compiling():
            # A row for each sample is no work, but blocks that find it made need another graph.
            return make()
        key = ("bias", queries, keys, width, slopes, like.dtype, like.device, causal)
        return self.once(key, make)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of ``make``, which is called once for equal keys."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def narrows(window: Window, keys: int, causal: bool = True) -> bool:
    """True if a window hides any of ``keys`` keys."""
    if isinstance(window, Chunk):
        return keys > window.size
    return window is not None and keys > (window if causal else window // 2 + 1)


def first_key(query: Place, window: int | Chunk, causal: bool = True) -> Place:
    """The position of the first key in the window of a query, which may be before the sequence."""
    if isinstance(window, Chunk):
        return query // window.size * window.size
    return query - (window - 1 if causal else window // 2)


def last_key(query: Place, window: int | Chunk, causal: bool = True) -> Place:
    """The position of the last key in the window of a query, which may be after the sequence."""
    if causal:
        return query
    if isinstance(window, Chunk):
        return (query // window.size + 1) * window.size - 1
    return query + window // 2


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """bool [S, T]: the last query sees all keys, each earlier one a key fewer."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def window_mask(
    queries: int, keys: int, window: int | Chunk, device: torch.device, causal: bool = True
) -> Tensor:
    """bool [S, T]: causal, and only the last ``window`` keys of each query; or the keys that are
    at most half as many places away, as flash-attention and ModernBERT count; or those of its
    chunk."""
    if isinstance(window, Chunk):
        chunks_T = torch.arange(keys, device=device) // window.size
        same_ST = chunks_T[keys - queries :, None] == chunks_T
        return same_ST & causal_mask(queries, keys, device) if causal else same_ST
    if not causal:
        ones = torch.ones(queries, keys, dtype=torch.bool, device=device)
        return ones.tril(window // 2).triu(-(window // 2))
    return causal_mask(queries, keys, device).triu(keys - queries - window + 1)


def document_mask(document_ids_BS: Tensor, causal: bool = True) -> Tensor:
    """bool [B, 1, S, S]: attention within equal document ids."""
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
    """[N, S, T]: -slope x (query position - key position), last query at the last key."""
    places_T = torch.arange(keys, device=device, dtype=dtype)
    distances_ST = places_T[keys - queries :, None] - places_T
    return -slopes_on(slopes, device, dtype)[:, None, None] * distances_ST


class Folding(Protocol):
    """Cuts sequences into parts that attend by themselves: between projections and kernel, so that
    tensor and sequence parallelism know nothing of it."""

    def fold(self, q_BSND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of the parts, each a separate sample. The positions in a
        part are 0, 1, 2, ..., and it has no masks."""
        ...

    def unfold(self, y_PSND: Tensor, samples: int, length: int) -> Tensor:
        """The output of the parts as that of so many samples with so many queries,
        [B, S, N, D]."""
        ...
