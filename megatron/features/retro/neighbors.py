"""Interfaces through which layers and generation access the neighbours of chunks.

Shapes: S current tokens, N query heads, K key and value heads, D head width, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from megatron.model.attention_masks import AttentionScoring


class NeighborSpec(NamedTuple):
    """Sizes of the neighbours that a RETRO model reads for each chunk.

    Attributes:
        chunk_length: tokens per chunk.
        neighbors: neighbours per chunk.
        neighbor_length: tokens per neighbour, including its continuation.
        layers: indices of the blocks that attend to neighbours, from 0, ascending. The first
            contains the encoder.
        crosses: returns whether a stage that starts at a given index of the layer list reads
            encoder output of an earlier stage.
    """

    chunk_length: int
    neighbors: int
    neighbor_length: int
    layers: tuple[int, ...]
    crosses: Callable[[int], bool]

    @property
    def tokens(self) -> int:
        """Total number of tokens in all neighbours of a chunk."""
        return self.neighbors * self.neighbor_length


class NeighborStore(Protocol):
    """Retrieved neighbours of the sequences being generated. C chunks of m tokens end at one of the
    current tokens, and each chunk's neighbours have E tokens in total.

    Attributes:
        neighbors_BLKR: neighbours' tokens for these chunks, [1, C, K, R].
    """

    neighbors_BLKR: Tensor

    def chunk_states(self, x_1SH: Tensor) -> Tensor:
        """Store the current tokens' hidden states, which the encoder attends to. Return the hidden
        states of the chunks that end, including those of earlier tokens: [1, C x m, H]."""
        ...

    def by_chunk(self, x_1TH: Tensor | None) -> Sequence[Tensor]:
        """Split the hidden states of all chunks that end, [1, C x n, H], into one [1, n, H] per
        chunk, so that each chunk is computed separately and its results do not depend on the
        others. Return an empty sequence if no chunk ends."""
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
        """Return a block's attention [1, S, N, D] of each token to the neighbours of the last
        chunk that has ended by then, including at this token. It is zero before the first chunk
        has ended. ``encoder_1TH`` is the encoder's output for the chunks that end now, [1, C x
        E, H], or None if none does. ``keys_and_values`` computes keys and values [1, ..., K, D]
        from it."""
        ...
