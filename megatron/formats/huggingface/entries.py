"""The lines of an architecture's table: which parameter is in which of Hugging Face's tensors.

Shapes: N query heads, K key and value heads, D head width, F inner width of the MLP, H hidden size.
Rows of our query-key-value weight are all queries, all keys, all values: [(N + 2K) D, H].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config import ModelConfig

Condition = Callable[[ModelConfig], bool]


@dataclass(frozen=True)
class Reordering:
    """A way to store one parameter in some tensors; ``from_hf`` is the exact inverse of
    ``to_hf``."""

    name: str
    tensors: int
    to_hf: Callable[[Tensor, ModelConfig], Sequence[Tensor]]
    from_hf: Callable[[Sequence[Tensor], ModelConfig], Tensor]


def _heads(model: ModelConfig) -> tuple[int, int, int]:
    attention = model.attention
    return attention.num_attention_heads, attention.num_query_groups, attention.kv_channels


def _qkv_rows(model: ModelConfig) -> list[int]:
    queries, groups, width = _heads(model)
    return [queries * width, groups * width, groups * width]


def _to_grouped(values: Tensor, model: ModelConfig) -> Sequence[Tensor]:
    _, groups, width = _heads(model)
    parts = [
        part.reshape(groups, -1, width, *values.shape[1:])
        for part in values.split(_qkv_rows(model))
    ]
    return (torch.cat(parts, dim=1).reshape(values.shape),)


def _from_grouped(tensors: Sequence[Tensor], model: ModelConfig) -> Tensor:
    queries, groups, width = _heads(model)
    (values,) = tensors
    shares = values.reshape(groups, queries // groups + 2, width, *values.shape[1:])
    return torch.cat([part.flatten(0, 2) for part in shares.split([queries // groups, 1, 1], 1)])


def _from_rows(tensors: Sequence[Tensor], model: ModelConfig) -> Tensor:
    return torch.cat(list(tensors))


SAME = Reordering("as it is", 1, lambda values, _: (values,), lambda tensors, _: tensors[0])
"""One tensor, in our order."""

TRANSPOSED = Reordering(
    "transposed", 1, lambda values, _: (values.T,), lambda tensors, _: tensors[0].T
)
"""The matrix as [inputs, outputs] (GPT-2's Conv1D)."""

SEPARATE_QKV = Reordering(
    "separate q, k, v", 3, lambda values, model: values.split(_qkv_rows(model)), _from_rows
)
"""A tensor each for queries, keys and values."""

TWICE = Reordering(
    "twice", 2, lambda values, _: (values, values.clone()), lambda tensors, _: tensors[0]
)
"""Two tensors of the same values, of which the first counts."""

SEPARATE_KV = Reordering("separate k, v", 2, lambda values, _: values.chunk(2), _from_rows)
"""A tensor each for the keys and values of attention to another sequence."""

GATE_AND_UP = Reordering("separate gate, up", 2, lambda values, _: values.chunk(2), _from_rows)
"""A tensor each for gate and up projection, which are [2F, H] here."""

GROUPED_QKV = Reordering("q, k, v by group", 1, _to_grouped, _from_grouped)
"""Each key and value head follows the queries that share it: [K, N/K + 2, D, H]. With as many key
heads as query heads that is [N, 3, D, H], the order of Megatron, GPT-NeoX and BLOOM."""


def always(model: ModelConfig) -> bool:
    """The condition of an entry that every model has."""
    return True


def biased(model: ModelConfig) -> bool:
    """Whether all linear layers have biases."""
    return model.mlp.bias


def qkv_biased(model: ModelConfig) -> bool:
    """Whether queries, keys and values have biases."""
    return model.attention.qkv_bias


def attention_biased(model: ModelConfig) -> bool:
    """Whether all of attention's linear layers have biases."""
    return model.attention.proj_bias


def untied(model: ModelConfig) -> bool:
    """Whether the head has weights of its own."""
    return not model.embedding.tied


@dataclass(frozen=True)
class Entry:
    """One kind of parameter in both forms: ``ours`` is the canonical name, with ``{n}`` for the
    number of the block; ``when`` says whether a model has it.

    Their names have ``{n}`` too, or ``{before}`` for the number of the block before it, where
    ``first`` are the names in the first block; outside of blocks ``{last}`` is the last block's."""

    ours: str
    theirs: tuple[str, ...]
    form: Reordering = SAME
    when: Condition = always
    first: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.theirs) == self.form.tensors, self.ours

    @property
    def stack(self) -> str | None:
        """Name of the stack of blocks that it belongs to; None outside of blocks."""
        return self.ours.partition(".{n}.")[0] if "{n}" in self.ours else None


def weight(ours: str, theirs: str, when: Condition = always) -> tuple[Entry, ...]:
    """An embedding, or the head."""
    return (Entry(f"{ours}.weight", (f"{theirs}.weight",), when=when),)


def norm(ours: str, theirs: str, when: Condition = always) -> tuple[Entry, ...]:
    """A norm, with a bias where it has one."""

    def has_bias(model: ModelConfig) -> bool:
        return when(model) and model.norm.traits.biased

    return (
        *weight(ours, theirs, when),
        Entry(f"{ours}.bias", (f"{theirs}.bias",), when=has_bias),
    )


def linear(
    ours: str, *theirs: str, form: Reordering = SAME, bias: Condition = biased
) -> tuple[Entry, ...]:
    """A linear layer; the bias of a transposed weight is stored as it is."""
    bias_form = SAME if form.name == "transposed" else form
    return (
        Entry(f"{ours}.weight", tuple(f"{name}.weight" for name in theirs), form),
        Entry(f"{ours}.bias", tuple(f"{name}.bias" for name in theirs), bias_form, bias),
    )


def block(prefix: str, *parts: Sequence[Entry], stack: str = "layers") -> tuple[Entry, ...]:
    """The entries of a block of a stack, given without ``layers.{n}.`` and ``prefix`` in their
    names."""
    return tuple(
        dataclasses.replace(
            entry,
            ours=f"{stack}.{{n}}.{entry.ours}",
            theirs=tuple(f"{prefix}.{name}" for name in entry.theirs),
        )
        for part in parts
        for entry in part
    )


def llama_entries(*further: Sequence[Entry], mlp_norm: str = "post_attention_layernorm",
                  qkv_bias: Condition = biased, proj_bias: Condition = biased,
                  fused: bool = False) -> tuple[Entry, ...]:  # fmt: skip
    """The table of Llama and of architectures that name their tensors like it.

    Args:
        further: entries of a block that Llama does not have.
        mlp_norm: their name of the norm before the MLP.
        fused: whether query, key and value are one tensor, and gate and up too, in our order.
    """
    if fused:
        qkv = linear("attention.qkv", "self_attn.qkv_proj", bias=qkv_bias)
        up = linear("mlp.up", "mlp.gate_up_proj")
    else:
        qkv = linear("attention.qkv", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                     form=SEPARATE_QKV, bias=qkv_bias)  # fmt: skip
        up = linear("mlp.up", "mlp.gate_proj", "mlp.up_proj", form=GATE_AND_UP)
    return (
        *weight("embedding.word_embeddings", "model.embed_tokens"),
        *block(
            "model.layers.{n}",
            norm("attention_norm", "input_layernorm"),
            qkv,
            linear("attention.proj", "self_attn.o_proj", bias=proj_bias),
            *further,
            norm("mlp_norm", mlp_norm),
            up,
            linear("mlp.down", "mlp.down_proj"),
        ),
        *norm("final_norm.norm", "model.norm"),
        *weight("output_layer", "lm_head", when=untied),
    )
