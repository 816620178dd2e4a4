"""The parameters of a model as DeepSpeed's engines have them."""

from __future__ import annotations

from functools import lru_cache

from megatron.config import ModelConfig
from megatron.engine.universal_info import Registered, registered_parameters
from megatron.families import spec_of
from megatron.model.layer_list import LayerSpec
from megatron.parallel.mesh import Group
from megatron.parallel.shard import Shard
from megatron.parallel.tensor_parallel import TensorParallel


def layers_of(model: ModelConfig, size: int = 1) -> list[LayerSpec]:
    """The layer list of a model.

    Args:
        model: shape of the network, with the vocabulary sizes filled in.
        size: tensor-parallel size.
    """
    return spec_of(model).layers(TensorParallel(Group(tuple(range(size)))))


@lru_cache(maxsize=8)
def parameters_of(model: ModelConfig, size: int = 1) -> dict[str, list[Registered]]:
    """See :func:`registered_parameters` and :func:`layers_of`."""
    return registered_parameters(layers_of(model, size))


def whole_shards(model: ModelConfig) -> dict[str, Shard]:
    """How each whole parameter is cut, by canonical name."""
    return {name: parts[0].shard for name, parts in parameters_of(model).items()}
