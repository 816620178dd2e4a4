"""Upcycling: conversion of a dense checkpoint into one with experts, each of which is a copy of the
MLP or of a slice of it (He et al. 2024, arXiv:2410.07524; Megatron-LM
``core/transformer/moe/upcycling_utils.py``).

With granularity G, an MLP of inner width F is cut into G slices, each of which becomes an expert. E
experts are X = E / G copies of all slices. The G slices of a copy have the same row in the router,
so that they are chosen together. If a token's weights sum to 1, its output equals the dense model's
for G = 1 or a homogeneous activation (squared ReLU), and is close to it otherwise.

Shapes: E experts, F inner width of the dense MLP, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.reader import CheckpointReader, differences
from megatron.checkpoint.source import FoundCheckpoint, Source
from megatron.config import ConfigError, ModelConfig, ParallelConfig
from megatron.config.flags import NOT_NEGATIVE, POSITIVE, option
from megatron.engine.loading import together
from megatron.features.experts.flags import ExpertsConfig, UpcyclingConfig
from megatron.formats.conversion.commands import LoadConfig, opened, parsed, required
from megatron.formats.conversion.output import write_checkpoint
from megatron.formats.derived import DerivedSource
from megatron.formats.features import layers_of, whole_shards
from megatron.formats.inspection import counted
from megatron.model.layer_list import LayerStack, generator
from megatron.parallel.shard import init_of
from megatron.util.progress import say


def upcycled_model(dense: ModelConfig, experts: ExpertsConfig, granularity: int) -> ModelConfig:
    """Return the configuration of a dense network with its MLPs replaced by experts. Raises
    ConfigError if the flags of experts contradict the dense network."""
    part = experts
    if part.moe_ffn_hidden_size is None:
        part = replace(part, moe_ffn_hidden_size=dense.mlp.ffn_hidden_size // granularity)
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    return replace(dense.flags(), **values).resolve()


class UpcycledSource(DerivedSource):
    """Source that presents a dense checkpoint as the network ``model``. The router and shared
    experts, which the dense model lacks, are initialised as in a run with this seed. Raises
    ConfigError if the flags of experts do not fit the dense MLP, and CheckpointError if the dense
    network already has experts or differs in other ways."""

    title = "dense checkpoint with experts"

    def __init__(self, dense: Source, model: ModelConfig, granularity: int, seed: int) -> None:
        super().__init__(dense.folder)
        dense.require_model()
        self.dense, self.model, self.granularity, self._seed = dense, model, granularity, seed
        self.tokenizer, self.end_of_text, self.notes = (
            dense.tokenizer,
            dense.end_of_text,
            dense.notes,
        )
        self.model = replace(model, hf_architecture=None)
        part = model.part(ExpertsConfig)
        self._check(part)
        self._shards = whole_shards(model)
        with torch.device("meta"):
            stack = LayerStack(layers_of(model), ParallelConfig())
        self._init = {name: init_of(param) for name, param in stack.canonical_parameters()}
        self._dense = set(dense.names())

    def _check(self, part: ExpertsConfig) -> None:
        where, inner = self.dense.folder, self.dense.model.mlp.ffn_hidden_size
        if not self.dense.model.part(ExpertsConfig).idle:
            raise CheckpointError(
                f"{where} has experts already, and upcycling starts from a dense model; leave out "
                "--moe-use-upcycling to load this one"
            )
        if part.moe_latent_size or part.mlp_type != "standard":
            flag = "--moe-latent-size" if part.moe_latent_size else "--mlp-type residual"
            raise ConfigError(
                f"{flag} contradicts upcycling: an MLP has no such part; leave it out"
            )
        wrong = [n for n in part.layer_experts if n % self.granularity]
        if wrong:
            raise ConfigError(
                f"--moe-upcycling-granularity {self.granularity} must divide --num-experts "
                f"{wrong[0]}"
            )
        if part.moe_ffn_hidden_size != inner / self.granularity:
            raise ConfigError(
                f"--moe-ffn-hidden-size {part.moe_ffn_hidden_size}: the MLPs of {where} have "
                f"{inner}, of which an expert has 1/{self.granularity} "
                f"(--moe-upcycling-granularity): give {inner / self.granularity:g}"
            )
        values: dict[str, Any] = {field.name: field.default for field in fields(part)}
        without = replace(self.model.flags(), **values, ffn_hidden_size=inner).resolve()
        if 0 in part.layer_experts and self.model.mlp.ffn_hidden_size != inner:
            without = replace(self.model.flags(), **values).resolve()
        if lines := differences(self.dense.model.with_head_of(self.model), without):
            raise CheckpointError(f"{where} has a different architecture: {'; '.join(lines)}")

    def names(self) -> Sequence[str]:
        return list(self._shards)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shards[name].canonical_shape

    def dtype(self, name: str, kind: str = "weight") -> str:
        return self.dense.dtype(self.dense.names()[0])

    def copy_tokenizer(self, target: Path) -> bool:
        return self.dense.copy_tokenizer(target)

    @property
    def generation(self) -> dict[str, Any]:
        return self.dense.generation

    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        if kind != "weight":
            raise CheckpointError(f"{self.folder} has no {kind} of {name}")
        if name in self._dense:
            return self.dense.tensor(name)
        shape = self.shape(name)
        if ".mlp.experts." in name:
            return self._experts(name, shape[0])
        if name not in self._init:
            return torch.zeros(shape)  # buffers start at zero
        values = self._init[name].draw(shape, generator(self._seed, name))
        if ".mlp.router." in name:
            values = values[: shape[0] // self.granularity]
            return values.repeat_interleave(self.granularity, 0)
        return values

    def _experts(self, name: str, experts: int) -> Tensor:
        values = self.dense.tensor(name.replace(".mlp.experts.", ".mlp."))
        if name.endswith(".down.bias"):  # not divided among the experts, because weights sum to 1
            return values.expand(experts, -1).clone()
        dim = 0 if ".up." in name else 1
        gated = dim == 0 and self.model.mlp.gated
        halves = values.chunk(2) if gated else (values,)
        pieces = zip(*(half.chunk(self.granularity, dim) for half in halves), strict=True)
        parts = torch.stack([torch.cat(piece) for piece in pieces])
        parts = parts * weight_scale(self.model, self.granularity, experts)
        return parts.repeat(experts // self.granularity, *[1] * (parts.dim() - 1))


def weight_scale(model: ModelConfig, granularity: int, experts: int) -> float:
    """Return the factor for an expert's weights that keeps a token's output as large as the dense
    MLP's. It is s^(1/3) if the output is a product of three weights (a gate, or squared ReLU), else
    s^(1/2). If a token's weights sum to 1, s is the granularity G. Otherwise s = E G / k, because
    an untrained router weights each expert by 1 / E, and a token uses k of them."""
    part = model.part(ExpertsConfig)
    sums_to_1 = not part.moe_router_pre_softmax or bool(part.moe_router_normalize)
    if part.moe_gate == "deepspeed":
        sums_to_1 = part.moe_router_topk > 1
    scale = float(granularity)
    if not sums_to_1:
        scale *= experts / part.moe_router_topk
    cubic = model.mlp.gated or model.mlp.activation == "squared_relu"
    return scale ** (1 / 3 if cubic else 1 / 2)


@dataclass(frozen=True)
class UpcycleConfig:
    """Upcycling of a dense checkpoint."""

    output: str | None = option(None)
    """Folder of checkpoints to create. It must be new or empty."""
    moe_upcycling_granularity: int = option(1, bounds=POSITIVE)
    """Number of slices into which an MLP is cut, each of which becomes an expert."""
    seed: int = option(1234, bounds=NOT_NEGATIVE)
    """Seed of the router's initial weights, like the --seed of a run."""


def upcycle_command(argv: Sequence[str]) -> None:
    """Run ``tools/convert_checkpoint.py upcycle``. Raises ConfigError or CheckpointError if the
    flags do not fit the dense model."""
    checkpoint, config, experts = parsed(
        argv, "upcycle", "Writes a dense checkpoint as one of experts.", LoadConfig, UpcycleConfig,
        ExpertsConfig,
    )  # fmt: skip
    output, granularity = Path(required(config, "output")), config.moe_upcycling_granularity
    dense = opened(checkpoint)
    if not any(count > 1 for count in experts.num_experts):
        raise ConfigError("--num-experts is missing: the number of experts of a layer")
    source = UpcycledSource(
        dense, upcycled_model(dense.model, experts, granularity), granularity, config.seed
    )
    written = write_checkpoint(output, source, iteration=0, moments=False, progress=say)
    print(f"{written}: {dense.folder} with experts; {counted(source)}")
    print(f"train on it with --load {output} --use-checkpoint-args")


def upcycle(context: Any) -> FoundCheckpoint:
    """Write a run's dense checkpoint, converted to experts, into ``--save`` before the first step.
    Collective: every rank must call this. Raises CheckpointError or ConfigError on failure."""
    config, engine = context.config, context.engine
    options, flags = config.checkpoint, config.section(UpcyclingConfig)
    folder = Path(options.save or "")

    def write() -> Path | None:
        if engine.mesh.world.rank:
            return None
        dense = context.source.found.open()
        granularity, seed = flags.moe_upcycling_granularity, config.training.seed
        source = UpcycledSource(dense, config.model, granularity, seed)
        written = write_checkpoint(folder, source, iteration=0, moments=False)
        say(
            f"{written}: {dense.folder} with {config.model.part(ExpertsConfig).layers} layers of "
            "experts; to continue, name this folder by --load, without --moe-use-upcycling"
        )
        return written

    together(engine, write)
    return FoundCheckpoint(CheckpointReader, folder / "global_step0")
