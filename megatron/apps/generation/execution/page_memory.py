"""The memory of keys and values: pages of equal size, the same in all blocks of a process.

Shapes: X pages, K key and value heads, P positions of a page, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PageShape:
    """What a page holds on one rank: keys and values of ``positions`` positions in ``blocks``
    blocks with ``heads`` key and value heads of ``width`` channels each; and ``others``, bytes of
    what else belongs to a page."""

    blocks: int
    heads: int
    positions: int
    width: int
    dtype: torch.dtype
    others: int = 0

    @property
    def bytes(self) -> int:
        """2 x blocks x heads x positions x width x bytes of a number, and others."""
        numbers = 2 * self.blocks * self.heads * self.positions * self.width
        return numbers * self.dtype.itemsize + self.others


class PageMemory:
    """All pages of a process, [blocks, 2, X, K, P, D] with keys first; allocated once, since a
    larger copy would need both at a time. A CPU's memory is taken from the system when a page is
    first used.

    Args:
        layers: numbers of the blocks.
    """

    def __init__(
        self, layers: Sequence[int], shape: PageShape, pages: int, device: torch.device
    ) -> None:
        assert len(layers) == shape.blocks
        self.shape, self.pages = shape, pages
        self.places = {layer: place for place, layer in enumerate(layers)}
        size = (shape.blocks, 2, pages, shape.heads, shape.positions, shape.width)
        self.pool = torch.empty(size, dtype=shape.dtype, device=device)

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a block, [X, K, P, D] each."""
        keys, values = self.pool[self.places[layer]]
        return keys, values

    def clear(self, pages: Sequence[int]) -> None:
        """Fills pages with zeros: what no position has written is multiplied by a probability of
        zero, and must be finite."""
        for page in pages:
            self.pool[:, :, page] = 0.0

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """(from, to), in order."""
        for source, target in copies:
            self.pool[:, :, target] = self.pool[:, :, source]
