"""Parameters of Megatron-DeepSpeed and GPT-NeoX folders: their names and rows.

Pipelines name parameters by the layer's place (``5.self_attention.query_key_value.weight``,
``tied_modules.embed.word_embeddings.weight``), plain modules by Megatron's own names
(``language_model.encoder.layers.2...``). At which place the blocks begin differs between releases,
so that they are found by what they hold.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.files import CheckpointError
from megatron.config import ModelConfig
from megatron.formats.deepspeed_folders.naming import RankNaming
from megatron.formats.legacy_megatron.names import (
    is_buffer,
    qkv_from_megatron,
    rename,
    rename_block,
)

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
}
"""Names in the layers behind the blocks: norm, head."""
_TIED = "tied_modules.embed."
_ADDED_ONCE = (".proj.bias", ".down.bias")
_QKV_VERSION = 3.0
"""Both order query-key-value rows as Megatron's checkpoints do from version 2 on."""


class ForeignNaming(RankNaming):
    """The names of a folder of another trainer.

    Args:
        model: the network.
        names: the folder's names.
        folder: the checkpoint, for messages.
        split_biases: whether each tensor rank has an addend of the row-parallel biases (GPT-NeoX)
            instead of a copy.

    Raises:
        CheckpointError: a parameter is not known, or one that the network has is not there.
    """

    def __init__(
        self, model: ModelConfig, names: Sequence[str], folder: Path, split_biases: bool = False
    ) -> None:
        super().__init__(model)
        self._split_biases = split_biases
        self._found: dict[str, str] = {}
        blocks = sorted(
            {
                int(match[1])
                for name in names
                if (match := _PLACED.fullmatch(name)) and _block(match[2])
            }
        )
        number = {place: n for n, place in enumerate(blocks)}
        for name in names:
            if is_buffer(name):
                continue
            canonical = _canonical(name, number)
            if canonical == "output_layer.weight" and model.embedding.tied:
                continue
            if canonical not in self.shapes:
                raise CheckpointError(
                    f"{folder}: the parameter {name} is not one of the network that its "
                    f"arguments describe{'' if canonical is None else f' ({canonical})'}"
                )
            self._found.setdefault(canonical, name)
        missing = [name for name in self.shapes if name not in self._found]
        if missing:
            raise CheckpointError(f"{folder} has nothing for {', '.join(missing[:3])}")

    def parts(self, name: str) -> Sequence[str]:
        """See :meth:`Naming.parts`."""
        return [self._found[name]]

    def whole(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """See :meth:`Naming.whole`."""
        values = self.trim(name, parts[0].float())
        if ".attention.qkv." not in name:
            return values
        attention = self.model.attention
        heads, groups = attention.num_attention_heads, attention.num_query_groups
        return qkv_from_megatron(values, _QKV_VERSION, heads, groups, attention.kv_channels)

    def join(self, name: str, kind: str, shares: Sequence[Sequence[Tensor]]) -> Tensor:
        """See :meth:`RankNaming.join`."""
        (ranks,) = shares
        cut = self.shard(name).over("tensor")
        if cut is None:
            joined = ranks[0]
            if self._split_biases and kind == "weight" and name.endswith(_ADDED_ONCE):
                # Every addend has the sum's gradient, and so the sum's moments.
                joined = torch.stack([share.float() for share in ranks]).sum(0)
        elif len(cut.parts) == 2:
            halves = zip(*(share.chunk(2, cut.dim) for share in ranks), strict=True)
            joined = torch.cat([part for half in halves for part in half], cut.dim)
        else:
            joined = torch.cat(list(ranks), cut.dim)
        return self.whole(name, [joined])


def _block(rest: str) -> str | None:
    """Canonical name within a block; RMSNorm's weight is ``scale`` in GPT-NeoX."""
    return rename_block(re.sub(r"\.scale$", ".weight", rest))


def _canonical(name: str, number: dict[int, int]) -> str | None:
    name = name.removeprefix("module.")
    if name.startswith(_TIED):
        return _EMBEDDING.get(name.removeprefix(_TIED))
    match = _PLACED.fullmatch(name)
    if match is None:
        return rename(name)
    place, rest = int(match[1]), match[2]
    if place in number:
        inner = _block(rest)
        return None if inner is None else f"layers.{number[place]}.{inner}"
    if not number or place < min(number):
        return _EMBEDDING.get(rest)
    if rest == "word_embeddings.weight":
        return "output_layer.weight"
    return _LAST.get(re.sub(r"(^|\.)scale$", r"\1weight", rest))
