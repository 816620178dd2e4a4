"""Model with adapters: its own parameters are frozen, and low-rank additions to the linear layers
of its blocks are trained."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from megatron.config import ConfigError, ModelConfig, RunConfig
from megatron.config.features import taking_part
from megatron.config.flags import nearest
from megatron.features.adapters.flags import ALL_LINEAR, AdapterConfig, is_adapter
from megatron.features.adapters.layers import Addition, add_adapters
from megatron.features.adapters.nf4 import quantise_layer
from megatron.formats import LinearTarget, linear_targets
from megatron.model.layer_list import LayerSpec
from megatron.model.spec import ModelSpec
from megatron.parallel.layers import ParallelLinear
from megatron.parallel.tensor_parallel import TensorParallel

Additions = Mapping[str, Sequence[Addition]]
"""Adapters by the canonical name of their layer, with ``{n}`` instead of the block number."""


def with_adapters(spec: ModelSpec, config: RunConfig) -> ModelSpec:
    """Return the spec with the adapters of a run. All other parameters are frozen, except those of
    a head other than the language model's. Raises ConfigError if a target is unknown."""
    flags = config.section(AdapterConfig)
    additions = additions_of(config.model, flags.lora_targets)
    replaced = _replaced_layers(config.model)
    stacked = {name for name, layer in replaced.items() if is_stacked(layer)}
    if flags.qlora and stacked:
        raise ConfigError(
            "--qlora stores the weights of linear layers in 4 bits, and most weights of the model "
            "of --pretrained-checkpoint are its experts': leave it out, for LoRA"
        )
    if flags.use_dora and (matrices := sorted(stacked & additions.keys())):
        name = matrices[0].rpartition(".{n}.mlp.")[2]
        raise ConfigError(
            f"--use-dora is for linear layers, and --lora-targets {' '.join(flags.lora_targets)} "
            f"includes the matrices of experts ({name}): leave --use-dora out, or give the names "
            "of other layers"
        )
    head = spec.head_parts if config.model.head != "lm" else ()

    def layers(tp: TensorParallel) -> list[LayerSpec]:
        return [
            replace(each, build=partial(_build, each, additions, head, config))
            for each in spec.layers(tp)
        ]

    return replace(
        spec,
        layers=layers,
        draws=spec.draws or bool(flags.lora_dropout),
        is_addition=is_adapter,
    )


def _build(
    spec: LayerSpec, additions: Additions, head: tuple[str, ...], config: RunConfig
) -> nn.Module:
    module, flags = spec.build(), config.section(AdapterConfig)
    if not f"{spec.name}.".startswith(head):
        module.requires_grad_(False)
    if not spec.block:
        return module
    stack = spec.name.rpartition(".")[0]
    for path, layer in module.named_modules():
        own = additions.get(f"{stack}.{{n}}.{path}", ())
        if own and is_stacked(layer):
            layer.add_low_rank(flags.lora_rank, flags.scale, flags.lora_dropout)
        if not isinstance(layer, ParallelLinear):
            continue
        # also without adapters, because they implement GEMMs with 4-bit weights
        if own or flags.qlora:
            add_adapters(layer, own, flags)
        if flags.qlora:
            quantise_layer(layer, flags.qlora_double_quant)
    return module


def additions_of(model: ModelConfig, targets: Sequence[str]) -> Additions:
    """Return the adapters that ``--lora-targets`` selects. Raises ConfigError if a name does not
    exist in the model's Hugging Face architecture."""
    known: list[LinearTarget] = [*linear_targets(model)]
    layers = {target.layer for target in known}
    replaced = [name for name in _replaced_layers(model) if name not in layers]
    known += [LinearTarget(name, "", (), name) for name in replaced]
    wanted = set()
    for name in targets:
        chosen = {target for target in known if name == ALL_LINEAR or _matches(target, name)}
        if not chosen:
            raise ConfigError(_unknown(name, known))
        wanted |= chosen
    additions: dict[str, list[Addition]] = defaultdict(list)
    for target in known:
        if target in wanted:
            additions[target.layer].append(Addition(target.part, target.parts))
    return additions


def _replaced_layers(model: ModelConfig) -> dict[str, nn.Module]:
    """Return the layers of MLPs and attention that other features substitute, by name: linear
    layers, and layers with several matrices, such as experts."""
    with torch.device("meta"):
        others = {
            "mlp": lambda feature, n: feature.mlp(model, n, TensorParallel()),
            "attention": lambda feature, n: feature.mixer(model, n, TensorParallel(), False),
        }
        return {
            f"layers.{{n}}.{name}.{path}": layer
            for name, of in others.items()
            for n in range(model.num_layers)
            if model.has(name, n)
            for feature in taking_part()
            if (module := of(feature, n)) is not None
            for path, layer in module.named_modules()
            if isinstance(layer, ParallelLinear) or is_stacked(layer)
        }


def is_stacked(layer: nn.Module) -> bool:
    """Return whether a layer has several stacked matrices and creates its adapters itself. Such a
    layer multiplies each token by the fraction ``share`` of its matrices."""
    return hasattr(layer, "add_low_rank")


def _matches(target: LinearTarget, name: str) -> bool:
    """Return whether a name ends the Hugging Face module's name, as in peft, or the layer's
    name."""
    return any(f".{full}".endswith(f".{name}") for full in (target.module, target.layer))


def _unknown(name: str, known: Sequence[LinearTarget]) -> str:
    names = list(dict.fromkeys(target.module.rpartition(".")[2] for target in known))
    return (
        f"--lora-targets {name}: the blocks of this model have no such linear layer; it has "
        f"{', '.join(names)}, or {ALL_LINEAR} for all of them"
        f"{nearest(name, [*names, ALL_LINEAR], '; did you mean {}?')}"
    )
