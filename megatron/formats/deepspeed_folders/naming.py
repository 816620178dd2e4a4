"""Mapping from the parameter names in a folder to canonical names.

A folder may have canonical names, names from an engine's layer list, or another trainer's names. A
canonical parameter may be stored as several tensors."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.files import CheckpointError
from megatron.config import ModelConfig
from megatron.formats.features import buffers_of, layers_of, parameters_of, whole_shards
from megatron.formats.legacy_megatron.experts import (
    is_of_experts,
    join_expert,
    of_one_expert,
    require_experts,
)
from megatron.formats.legacy_megatron.names import (
    is_buffer,
    qkv_from_megatron,
    rename,
    rename_block,
)
from megatron.formats.universal_info import Registered

_PLACED = re.compile(r"(\d+)\.(.+)")
_EMBEDDING = {
    "word_embeddings.weight": "embedding.word_embeddings.weight",
    "position_embeddings.weight": "embedding.position_embeddings.weight",
    "word_embeddings.norm.weight": "embedding.norm.weight",
    "word_embeddings.norm.bias": "embedding.norm.bias",
}
_LAST = {
    "weight": "final_norm.norm.weight",
    "bias": "final_norm.norm.bias",
    "norm.weight": "final_norm.norm.weight",
    "norm.bias": "final_norm.norm.bias",
    "lm_head.weight": "output_layer.weight",
    "final_linear.weight": "output_layer.weight",
    "word_embeddings.weight": "output_layer.weight",
}
"""Canonical names in the layers after the blocks: final norm and head."""
_TIED = "tied_modules.embed."
_QKV_VERSION = 3.0
"""Checkpoint version that defines the QKV row order of other trainers: Megatron's order from
version 2 on."""


class Naming:
    """Parameter names in one folder. They are canonical, unless a subclass defines others.
    ``shapes`` has the shapes of whole parameters without padding, by canonical name."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        self._shards = whole_shards(model)
        self.shapes = {name: shard.canonical_shape for name, shard in self._shards.items()}

    def parts(self, name: str) -> Sequence[str]:
        """Return the folder's names for the tensors that store a canonical parameter."""
        return [name]

    def whole(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Join the tensors that store a canonical parameter. Each is whole, but may have any shape
        and padding."""
        if len(parts) == 1:
            return self.trim(name, parts[0])
        return self.trim(name, torch.cat([part.reshape(-1) for part in parts]))

    def trim(self, name: str, values: Tensor) -> Tensor:
        """Remove padding rows, and reshape a parameter to its canonical shape. Raises
        CheckpointError if the values do not fit the shape."""
        shape = self.shapes[name]
        rows, rest = divmod(values.numel(), math.prod(shape[1:]))
        padded = shape != self._shards[name].full_shape
        if rest or rows < shape[0] or (rows > shape[0] and not padded):
            raise CheckpointError(
                f"{name} is {tuple(values.shape)}, but {shape} by the configuration"
            )
        return values.reshape(rows, *shape[1:])[: shape[0]]


class RankNaming(Naming, ABC):
    """Parameter names in a folder that stores each rank's shard separately."""

    @abstractmethod
    def join(self, name: str, kind: str, shares: Sequence[Sequence[Tensor]]) -> Tensor:
        """Join a canonical parameter, or its moment ``kind``, from the shards of each tensor that
        stores it. The shards are ordered by rank."""

    def registered_name(self, place: int, rest: str) -> str:
        """Return the parameter name for a key ``rest`` in the file of the pipeline layer
        ``place``."""
        return f"{place}.{rest}"


class EngineNaming(RankNaming):
    """Parameter names of this project's engines, at a tensor-parallel size. For ``experts`` see
    ``TensorParallel``. Buffers have canonical names."""

    def __init__(self, model: ModelConfig, size: int, experts: str = "cut") -> None:
        super().__init__(model)
        self._size = size
        self._registered = parameters_of(model, size, experts) | {
            name: [Registered(name, shard)] for name, shard in buffers_of(model).items()
        }
        self._tied = {
            place: f"tied_modules.{layer.tied_key}"
            for place, layer in enumerate(layers_of(model))
            if layer.tied_key
        }

    def parts(self, name: str) -> Sequence[str]:
        return [part.name for part in self._registered[name]]

    def registered_name(self, place: int, rest: str) -> str:
        return f"{self._tied.get(place, place)}.{rest}"

    def join(self, name: str, kind: str, shares: Sequence[Sequence[Tensor]]) -> Tensor:
        canonical = torch.zeros(self.shapes[name])
        for part, ranks in zip(self._registered[name], shares, strict=True):
            for rank, share in enumerate(ranks):
                place = {"tensor": (rank, self._size)}
                shape = part.shard.local_shape(place)
                if share.numel() != math.prod(shape):
                    raise CheckpointError(
                        f"{part.name} is {tuple(share.shape)} on tensor-parallel rank {rank}, but "
                        f"{shape} by the configuration"
                    )
                part.shard.place(canonical, share.reshape(shape).float(), place)
        return canonical


class ForeignNaming(RankNaming):
    """Parameter names of Megatron-DeepSpeed.

    In pipelines a name contains the layer's index (``5.self_attention.query_key_value.weight``,
    ``tied_modules.embed.word_embeddings.weight``). Other modules use Megatron's own names
    (``language_model.encoder.layers.2...``). The index of the first block differs between releases,
    so blocks are recognised by their parameters. Raises CheckpointError if the folder has an
    unknown parameter or lacks one of the model's.
    """

    def __init__(self, model: ModelConfig, names: Sequence[str], folder: Path) -> None:
        super().__init__(model)
        parts: dict[str, dict[int, str]] = {}
        placed = [match for name in names if (match := _PLACED.fullmatch(self.plain(name)))]
        blocks = sorted({int(match[1]) for match in placed if self.block(match[2])})
        number = {place: n for n, place in enumerate(blocks)}
        for name in names:
            if self.unused(name):
                continue
            canonical, part = self._canonical(self.plain(name), number)
            copied = canonical == "output_layer.weight" and "word_embeddings" in name
            if copied and model.embedding.tied:
                continue
            if canonical not in self.shapes:
                raise CheckpointError(
                    f"{folder}: the parameter {name} is not one of the network that its "
                    f"arguments describe{'' if canonical is None else f' ({canonical})'}"
                )
            parts.setdefault(canonical, {}).setdefault(part, name)
        missing = [name for name in self.shapes if name not in parts]
        if missing:
            raise CheckpointError(f"{folder} has nothing for {', '.join(missing[:3])}")
        for name, named in parts.items():
            if is_of_experts(name):
                require_experts(named, self.shapes[name][0], name, folder)
        self._parts = {name: [named[at] for at in sorted(named)] for name, named in parts.items()}

    def plain(self, name: str) -> str:
        """Return a name without the prefixes that modules around the model add."""
        return name.removeprefix("module.")

    def unused(self, name: str) -> bool:
        """Return whether a tensor is not needed to compute the model, and can be ignored."""
        return is_buffer(name)

    def block(self, rest: str) -> tuple[str, int] | None:
        """Return the canonical name of ``rest``, a name within a block, and its index among the
        tensors that store the parameter."""
        canonical = rename_block(rest)
        return None if canonical is None else of_one_expert(canonical)

    def parts(self, name: str) -> Sequence[str]:
        return self._parts[name]

    def whole(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        values = super().whole(name, [part.float() for part in parts])
        if ".attention.qkv." not in name:
            return values
        attention = self.model.attention
        heads, groups = attention.num_attention_heads, attention.num_query_groups
        return qkv_from_megatron(values, _QKV_VERSION, heads, groups, attention.kv_channels)

    def join(self, name: str, kind: str, shares: Sequence[Sequence[Tensor]]) -> Tensor:
        if is_of_experts(name):
            gated, shape = self.model.mlp.gated, self.shapes[name][1:]
            experts = [join_expert(ranks, name, shape, gated).reshape(-1) for ranks in shares]
            return self.trim(name, torch.cat(experts).float())
        cut = self._shards[name].over("tensor")
        if cut is None:
            return self.whole(name, [self.replicated(name, kind, ranks) for ranks in shares])
        joined = [torch.cat(list(ranks), cut.dim) for ranks in shares]
        if len(shares) == 1 and len(cut.parts) == 2:
            halves = zip(*(share.chunk(2, cut.dim) for share in shares[0]), strict=True)
            joined = [torch.cat([part for half in halves for part in half], cut.dim)]
        shape = self.shapes[name]
        for values in joined:
            if values.dim() == len(shape) and values.shape[1:] != shape[1:]:
                raise CheckpointError(
                    f"{name} is {tuple(values.shape)} over all ranks, but {shape} by the "
                    "configuration"
                )
        return self.whole(name, joined)

    def replicated(self, name: str, kind: str, ranks: Sequence[Tensor]) -> Tensor:
        """Return a replicated parameter, given the copy of each rank."""
        return ranks[0]

    def _canonical(self, name: str, number: dict[int, int]) -> tuple[str | None, int]:
        if name.startswith(_TIED):
            return _EMBEDDING.get(name.removeprefix(_TIED)), 0
        match = _PLACED.fullmatch(name)
        if match is None:
            canonical = rename(name)
            return (None, 0) if canonical is None else of_one_expert(canonical)
        place, rest = int(match[1]), match[2]
        if place in number:
            inner = self.block(rest)
            return (None, 0) if inner is None else (f"layers.{number[place]}.{inner[0]}", inner[1])
        if not number or place < min(number):
            return _EMBEDDING.get(rest), 0
        return _LAST.get(re.sub(r"(^|\.)scale$", r"\1weight", rest)), 0
