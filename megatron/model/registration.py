"""How the parameters of a layer list are registered in DeepSpeed's engines, and how they are cut
there.

Engines know a parameter by its place in the layer list (``3.mlp.up.weight``,
``tied_modules.embed.weight``), pipelines and plain modules alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron.config import ParallelConfig
from megatron.model.layer_list import LayerSpec, LayerStack, canonical_parameters
from megatron.parallel.shard import Shard, shard_of


class Registered(NamedTuple):
    """A parameter of an engine's module.

    Attributes:
        name: what the module calls it.
        shard: how it is cut over tensor-parallel ranks.
    """

    name: str
    shard: Shard


def registered_parameters(layers: Sequence[LayerSpec]) -> dict[str, list[Registered]]:
    """The module's parameters by canonical name, in the order of the layers.

    Most are one parameter; with fewer key and value heads than ranks, queries are one and keys and
    values another.

    Args:
        layers: the whole layer list, cut over tensor-parallel ranks.
    """
    with torch.device("meta"):
        stack = LayerStack(layers, ParallelConfig())
    found: dict[str, list[Registered]] = {}
    canonical = canonical_parameters(stack, layers)
    for (registered, param), (name, _) in zip(stack.named_parameters(), canonical, strict=True):
        found.setdefault(name, []).append(Registered(registered, shard_of(param)))
    tied = {layer.tied_key: place for place, layer in reversed([*enumerate(layers)])}

    def place(name: str) -> int:
        """Tied modules are registered first, and stand where they are first used."""
        first, second, *_ = found[name][0].name.split(".")
        return tied[second] if first == "tied_modules" else int(first)

    return {name: found[name] for name in sorted(found, key=place)}
