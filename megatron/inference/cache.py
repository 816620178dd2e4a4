"""Keys and values of the positions that a model has seen."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class _Layer:
    """One layer's room, [B, K, capacity, D] each, of which ``length`` positions are taken."""

    k: Tensor
    v: Tensor
    length: int = 0


class KeyValueCache:
    """The cache of one batch; each layer's room is made when it first comes, and grows.

    Args:
        capacity: positions to make room for at first.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._layers: dict[int, _Layer] = {}

    @property
    def length(self) -> int:
        """Positions that the first layer holds: where the next token goes."""
        return self._layers[0].length if self._layers else 0

    def extend(self, layer: int, k_BKSD: Tensor, v_BKSD: Tensor) -> tuple[Tensor, Tensor]:
        """Appends keys and values of S new positions.

        Args:
            layer: number of the block.
            k_BKSD: the new keys.
            v_BKSD: the new values.

        Returns:
            Keys and values of all positions so far, each [B, K, T, D], as views of the cache.
        """
        if layer not in self._layers:
            self._layers[layer] = _Layer(_room(k_BKSD, self.capacity), _room(v_BKSD, self.capacity))
        held = self._layers[layer]
        start, end = held.length, held.length + k_BKSD.shape[2]
        if end > held.k.shape[2]:
            held.k, held.v = _grown(held.k, start, end), _grown(held.v, start, end)
        held.k[:, :, start:end] = k_BKSD
        held.v[:, :, start:end] = v_BKSD
        held.length = end
        return held.k[:, :, :end], held.v[:, :, :end]


def _room(x_BKSD: Tensor, positions: int) -> Tensor:
    batch, heads, _, width = x_BKSD.shape
    return x_BKSD.new_empty(batch, heads, positions, width)


def _grown(held: Tensor, taken: int, needed: int) -> Tensor:
    """A copy with at least twice the room, so that copying stays linear in the length."""
    grown = _room(held, max(needed, 2 * held.shape[2]))
    grown[:, :, :taken] = held[:, :, :taken]
    return grown
