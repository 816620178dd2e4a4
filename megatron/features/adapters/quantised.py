"""Frozen weights of linear layers in 4 bits, instead of their parameters (QLoRA).

They are no parameters: nothing casts, broadcasts, partitions or saves them. A layer makes a matrix
of 16 or 32 bits of its weight for each product, and frees it; the backward pass makes it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from megatron.features.adapters.nf4 import QuantisedMatrix, quantise
from megatron.parallel.layers import ParallelLinear
from megatron.parallel.mesh import Coordinates
from megatron.parallel.random import generator
from megatron.parallel.shard import init_of, shard_of

WEIGHTS = ("weight", "kv_weight")
"""The matrices of a linear layer."""


class QuantisedWeight:
    """A rank's share [OP, IP] of the weight of a linear layer. Of fused matrices each is quantised
    by itself, as a whole, so that the numbers are the same in every layout.

    Args:
        param: the parameter that it replaces.
        coordinates: of the rank.
        double: whether scales are quantised too.
    """

    requires_grad = False

    def __init__(self, param: nn.Parameter, coordinates: Coordinates, double: bool) -> None:
        self.shard, self.init = shard_of(param), init_of(param)
        self.shape = torch.Size(self.shard.local_shape(coordinates))
        self._coordinates, self._double = coordinates, double
        self._matrices: list[QuantisedMatrix] = []

    @property
    def filled(self) -> bool:
        return bool(self._matrices)

    @property
    def bytes(self) -> int:
        """Its memory."""
        return sum(matrix.bytes for matrix in self._matrices)

    def tensors(self) -> list[Tensor]:
        """All that it consists of, in order."""
        return [tensor for matrix in self._matrices for tensor in matrix.tensors()]

    @torch.no_grad()
    def fill(self, whole_OI: Tensor, device: torch.device) -> None:
        """Takes its share of a whole weight; quantises on ``device``, a matrix at a time."""
        assert tuple(whole_OI.shape) == self.shard.canonical_shape, (whole_OI.shape, self.shard)
        ranges = self.shard.ranges(self._coordinates)
        rows = ranges.get(0, ((0, whole_OI.shape[0]),))
        columns = ranges.get(1, ((0, whole_OI.shape[1]),))
        self._matrices = []
        for first, end in self._edges():
            matrix: QuantisedMatrix | None = None
            for (start, length), (left, width) in product(rows, columns):
                if first <= start < end:
                    if matrix is None:
                        matrix = quantise(whole_OI[first:end].to(device), self._double)
                    held = slice(start - first, start - first + length)
                    self._matrices.append(matrix.part(held, slice(left, left + width)))

    def initialise(self, name: str, seed: int, device: torch.device) -> None:
        """Fills it with the initial values of the parameter of this canonical name."""
        self.fill(self.init.draw(self.shard.canonical_shape, generator(seed, name)), device)

    def _edges(self) -> Iterator[tuple[int, int]]:
        """Rows of the matrices that are fused in the weight."""
        cut, first = self.shard.over("tensor"), 0
        fused = cut is not None and cut.dim == 0 and cut.parts
        for length in fused or (self.shard.canonical_shape[0],):
            yield first, first + length
            first += length

    def to(self, dtype: torch.dtype) -> Tensor:
        """The weight as numbers of this dtype, [OP, IP]: a new tensor."""
        assert self._matrices, "no weights are loaded"
        device = self._matrices[0].codes_OP.device
        found_OI = torch.empty(self.shape, dtype=dtype, device=device)
        start = 0
        for matrix in self._matrices:
            end = start + len(matrix.codes_OP)
            matrix.write(found_OI[start:end])
            start = end
        assert start == len(found_OI)
        return found_OI


def quantise_layer(layer: ParallelLinear, double: bool) -> None:
    """Puts weights in 4 bits instead of a layer's parameters, whose values are gone."""
    for name in WEIGHTS:
        param = layer._parameters.get(name)
        if param is not None:
            delattr(layer, name)
            setattr(layer, name, QuantisedWeight(param, layer.tp.coordinates, double))


def quantised_weights(module: nn.Module) -> Iterator[tuple[str, QuantisedWeight]]:
    """(registered name, weight) of every weight in 4 bits; parts of a parameter have its name."""
    for prefix, layer in module.named_modules():
        for name in WEIGHTS:
            values: Mapping[str, Any] = layer.__dict__
            weight = values.get(name)
            if isinstance(weight, QuantisedWeight):
                yield f"{prefix}.{weight.shard.whole or name}", weight
