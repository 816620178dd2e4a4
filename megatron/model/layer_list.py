"""A model is an ordered list of layer recipes, and what flows between the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.config import ParallelConfig
from megatron.model.attention_backends import document_mask
from megatron.parallel.random import generator
from megatron.parallel.shard import init_of, shard_of


class LayerCache(Protocol):
    """Keys and values of earlier positions, for generation."""

    def extend(self, layer: int, k_BKSD: Tensor, v_BKSD: Tensor) -> tuple[Tensor, Tensor]:
        """Appends the new keys and values of a layer; returns all of its keys and values."""
        ...


class Stream(NamedTuple):
    """What a layer takes and returns.

    Attributes:
        hidden: token ids int64 [B, S] into the first layer, hidden states [B, S, H] between
            layers, logits [B, S, V / tensor size] out of the last.
        position_ids: positions int64 [B, S]; None for 0, 1, 2, ...
        attention_mask: bool [B, 1, S, S], True where a token sees another; None for plain causal
            attention.
        cache: keys and values of earlier positions when generating.
    """

    hidden: Tensor
    position_ids: Tensor | None = None
    attention_mask: Tensor | None = None
    cache: LayerCache | None = None

    def with_hidden(self, hidden: Tensor) -> Stream:
        """The same stream carrying other hidden states."""
        return self._replace(hidden=hidden)


@dataclass(frozen=True)
class LayerRecipe:
    """How to build one layer.

    Attributes:
        name: canonical name of the layer (``layers.3``); its parameters' names start with it.
        build: makes the module, whose forward maps a Stream to a Stream.
        tied_key: layers with the same key are one module at several places of the list.
        forward: how a tied layer runs at this place; None calls the module.
        block: whether this is one of the repeated blocks, which recomputation is about.
    """

    name: str
    build: Callable[[], nn.Module]
    tied_key: str | None = None
    forward: Callable[[nn.Module, Stream], Stream] | None = None
    block: bool = False


class LayerStack(nn.Module):
    """The whole layer list as one module.

    Layers are registered as DeepSpeed's PipelineModule registers them (by their place in the list,
    tied ones under ``tied_modules.<key>``), so that parameter names are the same in both engines.

    Args:
        recipes: the layers, in order.
        parallel: what is recomputed in the backward pass.
    """

    def __init__(self, recipes: Sequence[LayerRecipe], parallel: ParallelConfig) -> None:
        super().__init__()
        self.recipes = tuple(recipes)
        self.tied_modules = nn.ModuleDict()
        for place, recipe in enumerate(recipes):
            if recipe.tied_key is None:
                self.add_module(str(place), recipe.build())
            elif recipe.tied_key not in self.tied_modules:
                self.tied_modules[recipe.tied_key] = recipe.build()
        self.steps = [self._step(place, recipe) for place, recipe in enumerate(recipes)]
        self.chunks = recomputed_chunks(recipes, parallel)

    def _step(self, place: int, recipe: LayerRecipe) -> Callable[[Stream], Stream]:
        if recipe.tied_key is None:
            return self._modules[str(place)]  # type: ignore[return-value]
        module, forward = self.tied_modules[recipe.tied_key], recipe.forward
        return module if forward is None else lambda stream: forward(module, stream)

    def forward(
        self,
        tokens_BS: Tensor,
        position_ids_BS: Tensor | None = None,
        document_ids_BS: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Token ids [B, S] to this rank's logits [B, S, V / tensor size].

        Tokens attend to those with the same document id only; without ids to all before them.
        """
        mask = None if document_ids_BS is None else document_mask(document_ids_BS)
        stream = Stream(tokens_BS, position_ids_BS, mask, cache)
        for first, last, recomputed in self.chunks:
            if recomputed and torch.is_grad_enabled():
                stream = checkpoint(self._run, first, last, stream, use_reentrant=False)
            else:
                stream = self._run(first, last, stream)
        return stream.hidden

    def _run(self, first: int, last: int, stream: Stream) -> Stream:
        for step in self.steps[first:last]:
            stream = step(stream)
        return stream

    def blocks(self) -> list[nn.Module]:
        """The repeated blocks, in order."""
        return [
            self._modules[str(place)]  # type: ignore[misc]
            for place, recipe in enumerate(self.recipes)
            if recipe.block
        ]

    def canonical_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(canonical name, parameter) of every parameter once, in registration order."""
        names = canonical_prefixes(self.recipes)
        for name, param in self.named_parameters():
            yield canonical_name(name, names), param


def recomputed_chunks(
    recipes: Sequence[LayerRecipe], parallel: ParallelConfig
) -> list[tuple[int, int, bool]]:
    """(first, end, recomputed) runs of layers that cover the list in order.

    ``full`` recomputation with method ``uniform`` recomputes all blocks, ``recompute_num_layers``
    at a time; with ``block`` the first ``recompute_num_layers`` blocks, one at a time.
    """
    length = len(recipes)
    if parallel.recompute_granularity != "full":
        return [(0, length, False)]
    blocks = [place for place, recipe in enumerate(recipes) if recipe.block]
    first, end = blocks[0], blocks[-1] + 1
    if parallel.recompute_method == "block":
        stop, step = min(end, first + parallel.recompute_num_layers), 1
    else:
        stop, step = end, parallel.recompute_num_layers
    chunks = [(at, min(at + step, stop), True) for at in range(first, stop, step)]
    return [(0, first, False), *chunks, (stop, length, False)]


def canonical_prefixes(recipes: Sequence[LayerRecipe]) -> dict[str, str]:
    """Registered prefix (``3`` or ``tied_modules.embed``) to canonical layer name."""
    prefixes: dict[str, str] = {}
    for place, recipe in enumerate(recipes):
        if recipe.tied_key is None:
            prefixes[str(place)] = recipe.name
        else:
            prefixes.setdefault(f"tied_modules.{recipe.tied_key}", recipe.name)
    return prefixes


def canonical_name(registered: str, prefixes: dict[str, str]) -> str:
    """Canonical name of a parameter: ``3.mlp.up.weight`` is ``layers.2.mlp.up.weight``."""
    parts = registered.split(".")
    length = 2 if parts[0] == "tied_modules" else 1
    return ".".join([prefixes[".".join(parts[:length])], *parts[length:]])


@torch.no_grad()
def initialise(name: str, param: nn.Parameter, seed: int, rank: int, size: int) -> None:
    """Fills one parameter: drawn whole, whatever the layout, then cut.

    Args:
        name: canonical name; with the seed it determines the values.
        param: the parameter, at its local shape.
        seed: the run's seed.
        rank: tensor-parallel rank.
        size: tensor-parallel size.
    """
    shard = shard_of(param)
    whole = init_of(param).draw(shard.canonical_shape, generator(seed, name))
    param.copy_(shard.cut(whole, rank, size))
