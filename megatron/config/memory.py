"""Memory that generation keeps for a block: keys and values, latent vectors, or states."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class KeysAndValues:
    """A key and a value of each token for each of ``heads`` heads of this tensor-parallel rank,
    ``width`` numbers each, in the dtype of the weights."""

    heads: int
    width: int
    tensors: ClassVar[int] = 2


@dataclass(frozen=True)
class Latents:
    """One vector of ``width`` numbers of each token, which all heads of all tensor-parallel ranks
    read, in the dtype of the weights: the key, whose first numbers are the value."""

    width: int
    heads: ClassVar[int] = 1
    tensors: ClassVar[int] = 1


@dataclass(frozen=True)
class States:
    """Tensors of these shapes for each sequence on this tensor-parallel rank, in float32, or in
    float64 if the model is. They are what ``step`` of ``LayerCache.recur`` takes and returns, in
    this order, without the axis of sequences."""

    shapes: tuple[tuple[int, ...], ...]

    @property
    def numbers(self) -> int:
        """Numbers of one sequence."""
        return sum(math.prod(shape) for shape in self.shapes)


TokenMemory = KeysAndValues | Latents
LayerMemory = TokenMemory | States


def memory_of(model: Any, layer: int, tensor_size: int = 1) -> LayerMemory | None:
    """The memory of a block of a :class:`~megatron.config.ModelConfig` on one of so many
    tensor-parallel ranks; None for a block without attention. Blocks after the last one, which
    predict further tokens, are as the last one."""
    layer = min(layer, model.blocks - 1)
    if not model.has("attention", layer):
        return None
    for part in model.parts:
        memory: LayerMemory | None = part.memory(layer, model, tensor_size)
        if memory is not None:
            return memory
    heads = max(1, model.attention.num_query_groups // tensor_size)
    return KeysAndValues(heads, model.attention.kv_channels)
