"""The linear layers of blocks by the names of their Hugging Face modules, which adapters use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from megatron.config import ModelConfig
from megatron.formats.huggingface.entries import (
    GATE_AND_UP,
    GROUPED_QKV,
    SAME,
    SEPARATE_KV,
    SEPARATE_QKV,
    Entry,
    Reordering,
)
from megatron.formats.huggingface.registry import architecture_of

LINEAR = (
    "attention.qkv", "attention.proj", "cross_attention.q", "cross_attention.kv",
    "cross_attention.proj", "mlp.up", "mlp.down",
)  # fmt: skip
"""The linear layers of our blocks."""

_MATRICES = {
    SEPARATE_QKV.name: ("q", "k", "v"),
    SEPARATE_KV.name: ("k", "v"),
    GATE_AND_UP.name: ("gate", "up"),
}


@dataclass(frozen=True)
class LinearTarget:
    """A linear module of a Hugging Face model, which is a layer of ours or one of the matrices that
    are fused in it. Names have ``{n}`` for the number of the block.

    Attributes:
        layer: canonical name of our layer, ``layers.{n}.attention.qkv``.
        part: name of the matrix, ``q``; empty where the module is the whole layer.
        index: its place among the fused ones.
        module: their name, ``model.layers.{n}.self_attn.q_proj``.
        form: how the rows of a whole layer are stored there.
    """

    layer: str
    part: str
    index: int
    module: str
    form: Reordering
    model: ModelConfig

    def rows_to_hf(self, values: Tensor) -> Tensor:
        """What has the rows of our weight, [O, ...], in their order."""
        return self.form.to_hf(values, self.model)[0].contiguous()

    def rows_from_hf(self, values: Tensor) -> Tensor:
        """The inverse of :meth:`rows_to_hf`."""
        return self.form.from_hf([values], self.model).contiguous()


def linear_targets(model: ModelConfig) -> tuple[LinearTarget, ...]:
    """The linear modules of all blocks of a model in the architecture that its configuration fits,
    in the order of a block; those of our layers, by our names, if it fits none."""
    try:
        entries = architecture_of(model).entries
    except ValueError:
        stacks = ("layers", "encoder.layers", "decoder.layers")
        names = [f"{stack}.{{n}}.{layer}" for stack in stacks for layer in LINEAR]
        return tuple(LinearTarget(name, "", 0, name, SAME, model) for name in names)
    return tuple(
        target for entry in entries if entry.when(model) for target in _targets_of(entry, model)
    )


def _targets_of(entry: Entry, model: ModelConfig) -> Iterator[LinearTarget]:
    layer, _, kind = entry.ours.rpartition(".")
    if kind != "weight" or layer.partition(".{n}.")[2] not in LINEAR:
        return
    parts = _MATRICES.get(entry.form.name, ("",))
    # Whatever is done to the columns of a weight does not concern the rows.
    form = GROUPED_QKV if entry.form is GROUPED_QKV else SAME
    for index, (part, theirs) in enumerate(zip(parts, entry.theirs, strict=True)):
        yield LinearTarget(layer, part, index, theirs.removesuffix(".weight"), form, model)
