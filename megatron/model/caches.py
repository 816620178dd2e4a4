"""Memory of generation, as the layers of a model see it.

Shapes: B samples, S current tokens, N query heads, K key and value heads, D head width, T tokens of
an encoder, W numbers of a latent key, V numbers of a latent value, X inputs and Y outputs of a
recurrent layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from megatron.model.attention_masks import AttentionScoring


class LayerCache(Protocol):
    """Keys and values of sequences, for generation: it stores those of the current tokens, which
    may be of several sequences, and attends with their queries to all up to each one's own.

    Attributes:
        lengths_BS: tokens of the sequence that each current token is in, int64.
        positions: the most that a sequence has.
        neighbors: the store of retrieved text, by the feature whose layers read it; None without
            retrieval.
        padded: the rows of a product of which so many count, so that these have the same bits
            whatever their number.
    """

    padded: Callable[[int], int]
    lengths_BS: Tensor
    positions: int
    neighbors: Any

    def attend(
        self,
        layer: int,
        q_BSND: Tensor,
        k_BSKD: Tensor,
        v_BSKD: Tensor,
        scores: AttentionScoring,
        bias_NT: Tensor | None,
        sinks_N: Tensor | None,
    ) -> Tensor:
        """[B, S, N, D] of a block; the bias is an addend of the scores for each distance from a
        query back to a key, a sink one more score of each query."""
        ...

    def attend_latents(
        self,
        layer: int,
        q_BSNW: Tensor,
        latents_BSW: Tensor,
        width: int,
        scores: AttentionScoring,
        sinks_N: Tensor | None,
    ) -> Tensor:
        """[B, S, N, V] of a block whose heads share one key, the latent vector, of which the first
        V = ``width`` numbers are also the value. Its memory is
        :class:`~megatron.config.sections.Latents`, and ``scores`` have a scale."""
        ...

    def recur(
        self,
        layer: int,
        inputs_BSX: Tensor,
        step: Callable[[Tensor, tuple[Tensor, ...] | None], tuple[Tensor, tuple[Tensor, ...]]],
    ) -> Tensor:
        """[B, S, Y] of a block whose state has the same size after any number of tokens. ``step``
        maps inputs [b, s, X] of sequences that continue, and the states before them, each [b, ...]
        (None at the start), to their outputs [b, s, Y] and the states after them. It is called for
        pieces of a prompt (b = 1) and for single tokens (s = 1) of several sequences, must not
        communicate, and a sequence's results must not depend on the others. The memory of the block
        is :class:`~megatron.config.sections.States`; the states are of its shapes and dtype,
        whatever that of the inputs."""
        ...

    def attend_encoded(
        self,
        layer: int,
        q_BSND: Tensor,
        keys_and_values: Callable[[Tensor], tuple[Tensor, Tensor]],
        scores: AttentionScoring,
        sinks_N: Tensor | None,
    ) -> Tensor:
        """[B, S, N, D] of a block's attention to the encoder's output, of which the function gives
        keys and values [B, T, K, D]."""
        ...
