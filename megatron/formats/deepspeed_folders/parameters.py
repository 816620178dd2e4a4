"""How the parameters of a model are registered in DeepSpeed's engines, and how they are cut there.

Engines know a parameter by its place in the layer list (``3.mlp.up.weight``,
``tied_modules.embed.weight``), pipelines and plain modules alike.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from megatron.config import ModelConfig, ParallelConfig
from megatron.families import spec_of
from megatron.model.layer_list import LayerStack, canonical_parameters
from megatron.parallel.mesh import Group
from megatron.parallel.region import TensorParallel
from megatron.parallel.shard import Shard, shard_of


class Registered(NamedTuple):
    """A parameter of an engine's module.

    Attributes:
        name: what the module calls it.
        shard: how it is cut over tensor-parallel ranks.
    """

    name: str
    shard: Shard


@lru_cache(maxsize=8)
def registered_parameters(model: ModelConfig, size: int = 1) -> dict[str, list[Registered]]:
    """The module's parameters by canonical name, in the order of the layers.

    Most are one parameter; with fewer key and value heads than ranks, queries are one and keys and
    values another.

    Args:
        model: shape of the network, with the vocabulary sizes filled in.
        size: tensor-parallel size.
    """
    parallel = ParallelConfig()
    region = TensorParallel(Group(tuple(range(size))))
    recipes = spec_of(model, parallel).layers(region)
    with torch.device("meta"):
        stack = LayerStack(recipes, parallel)
    found: dict[str, list[Registered]] = {}
    canonical = canonical_parameters(stack, recipes)
    for (registered, param), (name, _) in zip(stack.named_parameters(), canonical, strict=True):
        found.setdefault(name, []).append(Registered(registered, shard_of(param)))
    # Tied tables are registered first, and stand where they are first used.
    return {name: found[name] for name in sorted(found, key=_place)}


def _place(name: str) -> tuple[int, int]:
    """Embeddings, blocks by number, the rest."""
    first, second, *_ = name.split(".")
    if first == "layers":
        return 1, int(second)
    return (0 if first == "embedding" else 2), 0


def whole_shards(model: ModelConfig) -> dict[str, Shard]:
    """How each whole parameter is cut, by canonical name."""
    return {name: parts[0].shard for name, parts in registered_parameters(model).items()}
