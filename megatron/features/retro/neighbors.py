"""Neighbours of chunks, as layers and generation see them.

Shapes: S current tokens, N query heads, K key and value heads, D head width, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from megatron.model.attention_masks import AttentionScoring


class NeighborSpec(NamedTuple):
    """Text that retrieving models read for each chunk.

    Attributes:
        chunk_length: tokens of a chunk.
        neighbors: that are read for it.
        neighbor_length: tokens of a neighbour with its continuation.
        layers: numbers of the blocks that read them, from 0, ascending; their encoder is at the
            first.
        crosses: whether a stage that begins at an index of the layer list reads what their encoder
            computed before.
    """

    chunk_length: int
    neighbors: int
    neighbor_length: int
    layers: tuple[int, ...]
    crosses: Callable[[int], bool]

    @property
    def tokens(self) -> int:
        """Number of tokens of all neighbours of a chunk."""
        return self.neighbors * self.neighbor_length


class NeighborStore(Protocol):
    """Retrieved neighbours of sequences, for generation, where C chunks of m tokens end among the
    current tokens, and all neighbours of a chunk together have E tokens.

    Attributes:
        neighbors_BLKR: tokens of the neighbours of these chunks, [1, C, K, R].
    """

    neighbors_BLKR: Tensor

    def chunk_states(self, x_1SH: Tensor) -> Tensor:
        """Store the states of the current tokens that the neighbours' encoder reads. Return the
        states of the chunks that end, including earlier tokens: [1, C x m, H]."""
        ...

    def by_chunk(self, x_1TH: Tensor | None) -> Sequence[Tensor]:
        """Split the states of all chunks that end, [1, C x n, H], into one [1, n, H] per chunk:
        results computed one by one do not depend on the others. None (no chunk ends) yields
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
