"""A model is an ordered list of layer recipes, and what flows between the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.config import ParallelConfig
from megatron.model.attention_masks import AttentionMasks
from megatron.parallel.cross_entropy import Targets
from megatron.parallel.mesh import ALONE, Coordinates
from megatron.parallel.random import derive_seed, generator
from megatron.parallel.shard import init_of, shard_of


class LayerCache(Protocol):
    """Keys and values of earlier positions, for generation."""

    def extend(self, layer: int, k_BKSD: Tensor, v_BKSD: Tensor) -> tuple[Tensor, Tensor]:
        """Appends the new keys and values of a layer; returns all of its keys and values."""
        ...


class LayerState(NamedTuple):
    """What a layer takes and returns.

    Attributes:
        hidden: token ids int64 [B, S] into the first layer, hidden states [B, S, H] between
            layers; out of the last the mean loss, or logits [B, S, V / tensor size] without
            targets.
        position_ids: positions int64 [B, S]; None for 0, 1, 2, ...
        masks: which tokens see which, beyond causal attention; None for one document.
        cache: keys and values of earlier positions when generating.
        dropout_seed: what the dropout masks of this micro batch derive from; None leaves torch's
            generators alone.
        targets: what the last layer measures the loss by.
    """

    hidden: Tensor
    position_ids: Tensor | None = None
    masks: AttentionMasks | None = None
    cache: LayerCache | None = None
    dropout_seed: int | None = None
    targets: Targets | None = None

    def with_hidden(self, hidden: Tensor) -> LayerState:
        """The same stream carrying other hidden states."""
        return self._replace(hidden=hidden)


@dataclass(frozen=True)
class LayerSpec:
    """How to build one layer.

    Attributes:
        name: canonical name of the layer (``layers.3``); its parameters' names start with it.
        build: makes the module, whose forward maps a LayerState to a LayerState.
        tied_key: layers with the same key are one module at several places of the list.
        forward: how the module runs at this place; None calls it with the stream.
        block: whether this is one of the repeated blocks, which recomputation is about.
    """

    name: str
    build: Callable[[], nn.Module]
    tied_key: str | None = None
    forward: Callable[[nn.Module, LayerState], LayerState] | None = None
    block: bool = False


class LayerSequence:
    """Consecutive layers of a list, as they run on one process.

    Args:
        recipes: the layers.
        first: place of the first one in the whole list.
        modules: a module for each; tied layers share one.
        parallel: what is recomputed in the backward pass.

    Attributes:
        blocks: the repeated blocks among them.
    """

    def __init__(
        self,
        recipes: Sequence[LayerSpec],
        first: int,
        modules: Sequence[nn.Module],
        parallel: ParallelConfig,
    ) -> None:
        self.first = first
        self.steps: list[Callable[[LayerState], LayerState]] = [
            module if recipe.forward is None else partial(recipe.forward, module)
            for recipe, module in zip(recipes, modules, strict=True)
        ]
        self.blocks = [m for recipe, m in zip(recipes, modules, strict=True) if recipe.block]
        self.chunks = recomputed_chunks(recipes, parallel)

    def __call__(self, stream: LayerState) -> LayerState:
        """Takes the stream through the layers."""
        for begin, end, recomputed in self.chunks:
            if recomputed and torch.is_grad_enabled():
                stream = checkpoint(self._run_anew, begin, end, stream, use_reentrant=False)
            else:
                stream = self._run(begin, end, stream)
        return stream

    def _run_anew(self, begin: int, end: int, stream: LayerState) -> LayerState:
        # What is computed again has to make its masks again: compiled code notices if they are
        # there the second time.
        masks = None if stream.masks is None else stream.masks.anew()
        return self._run(begin, end, stream._replace(masks=masks))

    def _run(self, begin: int, end: int, stream: LayerState) -> LayerState:
        for place in range(begin, end):
            if stream.dropout_seed is not None:
                # A layer's masks depend on its place alone, not on the layers before it on this
                # process: they are the same however the list is cut into pipeline stages.
                torch.manual_seed(derive_seed(stream.dropout_seed, self.first + place))
            stream = self.steps[place](stream)
        return stream


class LayerStack(nn.Module):
    """The whole layer list as one module.

    Layers are registered as DeepSpeed's PipelineModule registers them (by their place in the list,
    tied ones under ``tied_modules.<key>``), so that parameter names are the same in both engines.

    Args:
        recipes: the layers, in order.
        parallel: what is recomputed in the backward pass.
    """

    def __init__(self, recipes: Sequence[LayerSpec], parallel: ParallelConfig) -> None:
        super().__init__()
        self.recipes = tuple(recipes)
        self.tied_modules = nn.ModuleDict()
        modules: list[nn.Module] = []
        for place, recipe in enumerate(recipes):
            if recipe.tied_key is None:
                modules.append(recipe.build())
                self.add_module(str(place), modules[-1])
            else:
                if recipe.tied_key not in self.tied_modules:
                    self.tied_modules[recipe.tied_key] = recipe.build()
                modules.append(self.tied_modules[recipe.tied_key])
        self.run = LayerSequence(recipes, 0, modules, parallel)

    def forward(
        self,
        tokens_BS: Tensor,
        position_ids_BS: Tensor | None = None,
        document_ids_BS: Tensor | None = None,
        cache: LayerCache | None = None,
        dropout_seed: int | None = None,
        targets: Targets | None = None,
    ) -> Tensor:
        """Token ids [B, S] to the mean loss, or to this rank's logits [B, S, V / tensor size]
        without targets.

        Tokens attend to those with the same document id only; without ids to all before them.
        """
        masks = AttentionMasks(document_ids_BS)
        stream = LayerState(tokens_BS, position_ids_BS, masks, cache, dropout_seed, targets)
        return self.run(stream).hidden

    def blocks(self) -> list[nn.Module]:
        """The repeated blocks, in order."""
        return self.run.blocks

    def canonical_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(canonical name, parameter) of every parameter once, in registration order."""
        return canonical_parameters(self, self.recipes)


def recomputed_chunks(
    recipes: Sequence[LayerSpec], parallel: ParallelConfig
) -> list[tuple[int, int, bool]]:
    """(first, end, recomputed) runs of layers that cover the list in order.

    ``full`` recomputation with method ``uniform`` recomputes all blocks, ``recompute_num_layers``
    at a time; with ``block`` the first ``recompute_num_layers`` blocks, one at a time.
    """
    length = len(recipes)
    if parallel.recompute_granularity != "full":
        return [(0, length, False)]
    blocks = [place for place, recipe in enumerate(recipes) if recipe.block]
    if not blocks:
        return [(0, length, False)]
    first, end = blocks[0], blocks[-1] + 1
    if parallel.recompute_method == "block":
        stop, step = min(end, first + parallel.recompute_num_layers), 1
    else:
        stop, step = end, parallel.recompute_num_layers
    chunks = [(at, min(at + step, stop), True) for at in range(first, stop, step)]
    return [(0, first, False), *chunks, (stop, length, False)]


def canonical_parameters(
    module: nn.Module, recipes: Sequence[LayerSpec]
) -> Iterator[tuple[str, nn.Parameter]]:
    """(canonical name, parameter) of the parameters of a module that registers layers of this list
    by their places; parameters that are parts of one have its name in common."""
    prefixes = canonical_prefixes(recipes)
    for registered, param in module.named_parameters():
        name = canonical_name(registered, prefixes)
        whole = shard_of(param).whole
        yield (name if whole is None else f"{name.rpartition('.')[0]}.{whole}"), param


def canonical_prefixes(recipes: Sequence[LayerSpec]) -> dict[str, str]:
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
def initialise(name: str, param: nn.Parameter, seed: int, coordinates: Coordinates = ALONE) -> None:
    """Fills one parameter: drawn whole, whatever the layout, then cut.

    Args:
        name: canonical name; with the seed it determines the values.
        param: the parameter, at its local shape.
        seed: the run's seed.
        coordinates: this rank's place in the mesh.
    """
    shard, init, random = shard_of(param), init_of(param), generator(seed, name)
    plain = param.device.type == "cpu" and param.dtype == torch.float32 and param.is_contiguous()
    if plain and tuple(param.shape) == shard.full_shape == shard.canonical_shape:
        # The same values without a second copy, whose pages cost as much as the numbers.
        init.fill(param, random)
        return
    whole = init.draw(shard.canonical_shape, random)
    param.copy_(shard.cut(whole, coordinates))
