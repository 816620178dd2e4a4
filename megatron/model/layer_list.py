"""A model is an ordered list of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from megatron.config import ParallelConfig
from megatron.model.layer_sequence import LayerSequence, RecomputedLayers, Step
from megatron.model.state import LayerState
from megatron.parallel.mesh import ALONE, Coordinates
from megatron.parallel.random import generator
from megatron.parallel.shard import init_of, shard_of


@dataclass(frozen=True)
class LayerSpec:
    """How to build one layer.

    Attributes:
        name: canonical name of the layer (``layers.3``); its parameters' names start with it.
        build: makes the module, whose forward maps a LayerState to a LayerState.
        tied_key: layers with the same key are one module at several places of the list.
        forward: how the module runs at this place; None calls it with the state.
        block: whether this is one of the repeated blocks, which recomputation is about.
    """

    name: str
    build: Callable[[], nn.Module]
    tied_key: str | None = None
    forward: Callable[[nn.Module, LayerState], LayerState] | None = None
    block: bool = False


def layer_sequence(
    specs: Sequence[LayerSpec],
    first: int,
    modules: Sequence[nn.Module],
    parallel: ParallelConfig,
) -> LayerSequence:
    """Consecutive layers of a list as one process runs them.

    Args:
        specs: the layers.
        first: place of the first one in the whole list.
        modules: a module for each; tied layers share one.
        parallel: what is recomputed in the backward pass.
    """
    layers: list[tuple[int | None, Step]] = [
        (first + n, module if spec.forward is None else partial(spec.forward, module))
        for n, (spec, module) in enumerate(zip(specs, modules, strict=True))
    ]
    steps: list[tuple[int | None, Step]] = []
    for begin, end, recomputed in recomputed_chunks(specs, parallel):
        chunk = layers[begin:end]
        steps += [(None, RecomputedLayers(chunk))] if recomputed else chunk
    blocks = [module for spec, module in zip(specs, modules, strict=True) if spec.block]
    return LayerSequence(steps, blocks)


class LayerStack(nn.Module):
    """The whole layer list as one module.

    Layers are registered as DeepSpeed's PipelineModule registers them (by their place in the list,
    tied ones under ``tied_modules.<key>``), so that parameter names are the same in both engines.

    Args:
        specs: the layers, in order.
        parallel: what is recomputed in the backward pass.
    """

    def __init__(self, specs: Sequence[LayerSpec], parallel: ParallelConfig) -> None:
        super().__init__()
        self.layers = tuple(specs)
        self.tied_modules = nn.ModuleDict()
        modules: list[nn.Module] = []
        for place, spec in enumerate(specs):
            if spec.tied_key is None:
                modules.append(spec.build())
                self.add_module(str(place), modules[-1])
            else:
                if spec.tied_key not in self.tied_modules:
                    self.tied_modules[spec.tied_key] = spec.build()
                modules.append(self.tied_modules[spec.tied_key])
        self.sequence = layer_sequence(specs, 0, modules, parallel)

    def forward(self, state: LayerState) -> LayerState:
        """The state of a micro batch, beginning with token ids, to that after the last layer: with
        losses where it has targets, else with logits.

        Beside losses nothing has a gradient. DeepSpeed 0.19.0 divides the gradient of every tensor
        that comes out by the number of micro batches, and what is below two of them is divided
        twice.
        """
        state = self.sequence(state)
        if not state.losses:
            return state
        encoder = None if state.encoder is None else state.encoder.detach()
        return state._replace(hidden=state.hidden.detach(), encoder=encoder)

    def blocks(self) -> list[nn.Module]:
        """The repeated blocks, in order."""
        return self.sequence.blocks

    def canonical_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(canonical name, parameter) of every parameter once, in registration order."""
        return canonical_parameters(self, self.layers)


def recomputed_chunks(
    specs: Sequence[LayerSpec], parallel: ParallelConfig
) -> list[tuple[int, int, bool]]:
    """(first, end, recomputed) runs of layers that cover the list in order.

    ``full`` recomputation with method ``uniform`` recomputes all blocks, ``recompute_num_layers``
    at a time; with ``block`` the first ``recompute_num_layers`` blocks, one at a time.
    """
    length = len(specs)
    if parallel.recompute_granularity != "full":
        return [(0, length, False)]
    blocks = [place for place, spec in enumerate(specs) if spec.block]
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
    module: nn.Module, specs: Sequence[LayerSpec]
) -> Iterator[tuple[str, nn.Parameter]]:
    """(canonical name, parameter) of the parameters of a module that registers layers of this list
    by their places; parameters that are parts of one have its name in common."""
    prefixes = canonical_prefixes(specs)
    for registered, param in module.named_parameters():
        name = canonical_name(registered, prefixes)
        whole = shard_of(param).whole
        yield (name if whole is None else f"{name.rpartition('.')[0]}.{whole}"), param


def canonical_prefixes(specs: Sequence[LayerSpec]) -> dict[str, str]:
    """Registered prefix (``3`` or ``tied_modules.embed``) to canonical layer name."""
    prefixes: dict[str, str] = {}
    for place, spec in enumerate(specs):
        if spec.tied_key is None:
            prefixes[str(place)] = spec.name
        else:
            prefixes.setdefault(f"tied_modules.{spec.tied_key}", spec.name)
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
