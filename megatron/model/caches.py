"""Memory of generation, as the layers of a model see it.

Shapes: B samples, S current tokens, N query heads, K key and value heads, D head width, T tokens of
an encoder, W numbers of a latent key, V numbers of a latent value, X inputs and Y outputs of a
recurrent layer; those of neighbours are with their class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from megatron.model.attention_masks import AttentionScoring


class NeighborStore(Protocol):
    """Retrieved neighbours of sequences, for generation, where C chunks of m tokens end among the
    current tokens, and E tokens are those of all neighbours of a chunk together.

    Attributes:
        neighbors_BLKR: tokens of the neighbours of these chunks, [1, C, K, R].
    """

    neighbors_BLKR: Tensor

    def chunk_states(self, x_1SH: Tensor) -> Tensor:
        """Stores the states of the current tokens that the neighbours' encoder reads; returns those
        of the chunks that end, whose earlier tokens may have come before: [1, C x m, H]."""
        ...

    def by_chunk(self, x_1TH: Tensor | None) -> Sequence[Tensor]:
        """Split the states of all chunks that end, [1, C x n, H], into those of each, [1, n, H]:
        results computed one by one do not depend on the others. None, where no chunk ends, gives
        nothing."""
        ...

    def attend(
        self,
        encoder_1TH: Tensor | None,
        layer: int,
        q_1SND: Tensor,
        keys_and_values: Callable[[Tensor], tuple[Tensor, Tensor]],
        scores: AttentionScoring,
        sinks_N: Tensor | None,
    ) -> Tensor:
        """[1, S, N, D] of a block's attention to the neighbours of the last chunk that has ended,
        with the token itself, and zeros before there is one. The encoder's output is that for the
        chunks that end, [1, C x E, H], and None without any; the function gives its keys and values
        [1, ..., K, D]."""
        ...


class LayerCache(Protocol):
    """Keys and values of sequences, for generation: it stores those of the current tokens, which
    may be of several sequences, and attends with their queries to all up to each one's own.

    Attributes:
        lengths_BS: tokens of the sequence that each current token is in, int64.
        positions: the most that a sequence has.
        neighbors: those of a model that retrieves; None without retrieval.
        padded: the rows of a product of which so many count, so that these have the same bits
            whatever their number.
    """

    padded: Callable[[int], int]
    lengths_BS: Tensor
    positions: int
    neighbors: NeighborStore | None

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
        :class:`~megatron.config.memory.Latents`, and ``scores`` have a scale."""
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
        is :class:`~megatron.config.memory.States`; the states are of its shapes and dtype,
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
