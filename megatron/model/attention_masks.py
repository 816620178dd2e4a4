"""Which keys a query sees, and what is added to its scores.

Causal attention sees the keys up to the query's own; full attention, and attention to another
sequence, all keys.

Shapes: B batch, N heads, S queries, T keys (T >= S when a cache holds earlier positions).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class AttentionMasks:
    """The masks of one micro batch. Each is made when a layer first needs it and serves the others.

    Args:
        document_ids_BS: in causal attention a token sees those with its own id only; None for one
            document.
        padding_BT: bool, the keys that nobody sees in attention that is not causal; each sequence
            has others. None for no padding.
    """

    def __init__(
        self, document_ids_BS: Tensor | None = None, padding_BT: Tensor | None = None
    ) -> None:
        self.documents = None if document_ids_BS is None else document_mask(document_ids_BS)
        self.tokens = None if padding_BT is None else ~padding_BT[:, None, None, :]
        self._made: dict[tuple, Tensor] = {}

    def anew(self) -> AttentionMasks:
        """The same, with nothing made yet."""
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
        attention with the last query at the last key, or where a query sees all keys.

        Args:
            queries: S.
            keys: T.
            window: keys that a query sees, itself included; None for all before it.
            device: where the mask is needed.
            causal: whether a query sees no later keys.
        """
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
        """What is added to the scores: -slope x distance with ALiBi, to both sides alike where
        attention is not causal, else 0, and -infinity where a query does not see a key;
        broadcastable to [B, N, S, T].

        Args:
            queries: S.
            keys: T.
            window: see :meth:`visible`.
            slopes: one for each of N heads; none without ALiBi.
            like: dtype and device are those of this tensor.
            causal: see :meth:`visible`.
        """
        narrow = window is not None and keys > window

        def make() -> Tensor:
            visible = self.visible(queries, keys, window, like.device, causal)
            if visible is None and causal:
                visible = causal_mask(queries, keys, like.device)
            biases = torch.zeros((), device=like.device)
            if slopes:
                # Fused kernels on the CPU take masks of two or four dimensions.
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
    """bool [S, T]: the last query sees all keys, each earlier one a key less."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def window_mask(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """bool [S, T]: causal, and of each query's keys the last ``window`` only."""
    return causal_mask(queries, keys, device).triu(keys - queries - window + 1)


def document_mask(document_ids_BS: Tensor) -> Tensor:
    """bool [B, 1, S, S]: causal attention within equal document ids."""
    same_BSS = document_ids_BS[:, :, None] == document_ids_BS[:, None, :]
    length = document_ids_BS.shape[1]
    return (same_BSS & causal_mask(length, length, same_BSS.device)).unsqueeze(1)


def distance_biases(
    queries: int, keys: int, slopes: tuple[float, ...], device: torch.device
) -> Tensor:
    """float32 [N, S, T]: -slope x (place of the query - place of the key), last query at the last
    key."""
    places_T = torch.arange(keys, device=device, dtype=torch.float32)
    distances_ST = places_T[keys - queries :, None] - places_T
    # Filled in on the device: a GPU would have to be waited for before a list is sent there.
    slopes_N = torch.stack([torch.full((), -slope, device=device) for slope in slopes])
    return slopes_N[:, None, None] * distances_ST


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Slope of each head (Press et al. 2021, arXiv:2108.12409): 2^(-8 n / heads), n from 1.

    Where the number of heads is no power of two, the slopes of the next lower power come first, and
    then every second one of the next higher power, as in the authors' code.
    """
    lower = 2 ** (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * n / lower) for n in range(1, lower + 1)]
    between = [2.0 ** (-8 * n / (2 * lower)) for n in range(1, 2 * lower + 1, 2)]
    return (*slopes, *between[: heads - lower])
