"""Megatron's parameter names, and the row order of its query-key-value matrix.

Megatron nests dictionaries (``language_model`` > ``embedding`` > ``word_embeddings`` > ``weight``)
and joins some levels with dots. The names in this file join all levels with dots:
``language_model.encoder.layers.3.self_attention.query_key_value.weight``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.config import ModelConfig
from megatron.formats.features import Requirement
from megatron.formats.legacy_megatron.experts import core_expert_name, rename_expert

OUTER = {
    "embedding.word_embeddings": "embedding.word_embeddings",
    "embedding.position_embeddings": "embedding.position_embeddings",
    "embedding.tokentype_embeddings": "embedding.tokentype_embeddings",
    "embedding.word_embeddings.norm": "embedding.norm",  # BLOOM has this norm
    "output_layer": "output_layer",
    "pooler.dense": "pooler.dense",
}
"""Canonical names of modules in ``language_model`` outside the stacks of blocks, by Megatron's
names. If Megatron has several names for a module, the first is written."""

HEADS = {
    "lm_head.dense": "lm_head.dense",
    "lm_head.layernorm": "lm_head.norm",
    "lm_head.norm": "lm_head.norm",
    "binary_head": "binary_head",
    "classification_head": "classification_head",
    "multichoice_head": "multichoice_head",
}
"""Canonical names of modules next to ``language_model``, by Megatron's names."""

BIASES = {
    "embedding.word_embeddings.bias": "lm_head.bias",
    "output_layer.bias": "lm_head.bias",
}
"""Megatron's name of the output head's bias in some families, by our canonical name. The first is
used with a tied embedding, the second without."""

BLOCK = {
    "input_layernorm": "attention_norm",
    "input_norm": "attention_norm",
    "self_attention.query_key_value": "attention.qkv",
    "attention.query_key_value": "attention.qkv",
    "self_attention.q_layernorm": "attention.q_norm",
    "self_attention.k_layernorm": "attention.k_norm",
    "self_attention.dense": "attention.proj",
    "attention.dense": "attention.proj",
    "post_attention_layernorm": "mlp_norm",
    "post_attention_norm": "mlp_norm",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
}
"""Canonical names of a block's modules, by Megatron's names."""

CORE_BLOCK = {
    "self_attention.linear_qkv.layer_norm": "attention_norm",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.q_layernorm": "attention.q_norm",
    "self_attention.k_layernorm": "attention.k_norm",
    "self_attention.linear_proj": "attention.proj",
    "mlp.linear_fc1.layer_norm": "mlp_norm",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc1": "mlp.up",
    "mlp.linear_fc2": "mlp.down",
}
"""Canonical names of a block's modules, by the core library's names. In the library, a linear layer
can contain the norm before it."""

DECODER_BLOCK = BLOCK | {
    "post_attention_layernorm": "cross_attention_norm",
    "post_attention_norm": "cross_attention_norm",
    "inter_attention.query": "cross_attention.q",
    "inter_attention.key_value": "cross_attention.kv",
    "inter_attention.dense": "cross_attention.proj",
    "post_inter_attention_layernorm": "mlp_norm",
    "post_inter_attention_norm": "mlp_norm",
}
"""Canonical names of the modules in a decoder block with cross-attention, by Megatron's names. Some
norms have other names than in ``BLOCK``."""

_LAST = {"final_layernorm": "final_norm.norm", "final_norm": "final_norm.norm"}
"""Canonical names of a stack's modules after its blocks, by Megatron's names."""


class Stack(NamedTuple):
    """A stack of blocks: the prefix of our names, Megatron's argument for the number of blocks, a
    function that returns this number, and the names of a block's modules."""

    prefix: str
    argument: str
    length: Callable[[ModelConfig], int]
    block: Mapping[str, str] = BLOCK


@dataclass(frozen=True)
class FamilyNames:
    """Parameter names of one model family.

    Attributes:
        marks: prefixes of names that only this family's files have, on the last pipeline rank;
            empty for the default family.
        stacks: stacks by Megatron's name, in pipeline order.
        flags: fields of :class:`ModelFlags` that have the same values in all models of the family.
        requirements: further conditions that a network must satisfy to be written.
        seen: returns fields of :class:`ModelFlags` that follow from the presence of parameters.
        heads: functions from a head's number of outputs to fields of :class:`ModelFlags`, by the
            name of the head's weight [outputs, hidden].
    """

    family: str
    marks: tuple[str, ...]
    stacks: Mapping[str, Stack]
    flags: Mapping[str, Any] = field(default_factory=dict)
    requirements: tuple[Requirement, ...] = ()
    seen: Callable[[Collection[str]], dict[str, Any]] = lambda names: {}
    heads: Mapping[str, Callable[[int], dict[str, Any]]] = field(default_factory=dict)


_ONE_STACK = {"encoder": Stack("", "num_layers", lambda model: model.num_layers)}
_BIASED = Requirement(lambda model: model.mlp.bias, "no --disable-bias-linear")

GPT = FamilyNames("gpt", (), _ONE_STACK)
BERT = FamilyNames(
    "bert",
    ("lm_head.dense.", "classification_head.", "multichoice_head."),
    _ONE_STACK,
    requirements=(
        _BIASED,
        Requirement(
            lambda model: (
                model.token_types == (2 if model.bert_binary_head or model.head != "lm" else 0)
            ),
            "--num-tokentypes 2, or 0 with --bert-no-binary-head",
        ),
        Requirement(lambda model: model.head != "span", "another head than for spans"),
    ),
    seen=lambda names: {"bert_binary_head": "binary_head.weight" in names},
    heads={
        "classification_head.weight": lambda n: {"head": "classification", "num_labels": n},
        "multichoice_head.weight": lambda _: {"head": "multiple_choice"},
    },
)

T5 = FamilyNames(
    "t5",
    ("language_model.decoder.",),
    {
        "encoder": Stack("encoder.", "num_layers", lambda model: model.num_layers),
        "decoder": Stack(
            "decoder.", "decoder_num_layers", lambda m: m.decoder_num_layers or 0, DECODER_BLOCK
        ),
    },
    flags={"encoder_decoder": True},
    # Megatron's T5 head has a bias. Ours has one only under these two conditions.
    requirements=(
        _BIASED,
        Requirement(
            lambda model: model.positions.position_embedding_type == "learned_absolute",
            "--position-embedding-type learned_absolute",
        ),
    ),
)

FAMILIES = (BERT, T5, GPT)
"""All families. The default one, which has no marks, is last."""
EMBEDDING = ("language_model.embedding.", "embedding.")
"""Name prefixes of embeddings: Megatron's and the core library's."""
HEAD_COPY = "word_embeddings_for_head.weight"
"""Name of the tied token embedding's copy on the last pipeline stage."""
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_STACK = re.compile(
    r"(?:language_model\.(?:(?P<stack>encoder|decoder)|transformer)|decoder)\.(?P<rest>.+)"
)
_FUSED_NORM = re.compile(r"\.layer_norm_(?=(?:weight|bias)$)")
_BUFFER = re.compile(r"(?:.*\.)?(?:inv_freq|_extra_state|masked_bias)")
"""Names of state that modules save besides parameters, and that is ignored."""


def family_of_names(names: Iterable[str]) -> FamilyNames:
    """Return the family of a model, given the parameter names on the last pipeline rank."""
    names = list(names)
    return next(
        known
        for known in FAMILIES
        if not known.marks or any(name.startswith(known.marks) for name in names)
    )


def names_of_family(family: str) -> FamilyNames:
    """Return the names of one of :data:`FAMILIES`."""
    return next(known for known in FAMILIES if known.family == family)


def is_buffer(name: str) -> bool:
    """Return whether a name is not a parameter's, but that of rotary frequencies or library
    state."""
    return _BUFFER.fullmatch(name) is not None


def rename_block(name: str, block: Mapping[str, str] = BLOCK) -> str | None:
    """Convert Megatron's name within a block (``self_attention.query_key_value.weight``) to the
    canonical name (``attention.qkv.weight``). An expert's name contains its index
    (``mlp.experts.3.up.weight``). Return None for an unknown name."""
    module, _, kind = _FUSED_NORM.sub(".layer_norm.", name).rpartition(".")
    for table in (block, CORE_BLOCK):
        if module in table and kind in ("weight", "bias"):
            return f"{table[module]}.{kind}"
    return rename_expert(name)


def is_embedding_copy(name: str, names: FamilyNames) -> bool:
    """Return whether a parameter is a copy of an embedding, on a pipeline rank after the first. The
    rank where a second stack begins has such copies, for example."""
    return len(names.stacks) > 1 and name.startswith(EMBEDDING)


def stack_name(name: str) -> str | None:
    """Return Megatron's name for the stack that contains a parameter, or None outside of stacks."""
    place = _STACK.fullmatch(name)
    return place and (place["stack"] or "encoder")


def stack_of(name: str) -> tuple[str, int] | None:
    """Return the stack and the block index in one of Megatron's parameter names, or None for a
    parameter outside of blocks."""
    place = _STACK.fullmatch(name)
    layer = place and _LAYER.fullmatch(place["rest"])
    return None if not place or not layer else (place["stack"] or "encoder", int(layer[1]))


def rename(name: str, first_layer: int = 0, names: FamilyNames = GPT) -> str | None:
    """Return the canonical name of one of Megatron's parameters, or None if it is unknown.
    ``first_layer`` is the index of the block that a pipeline stage calls ``layers.0``."""
    if names is not GPT and name == "lm_head.bias":
        return next(iter(BIASES))
    module, _, kind = name.rpartition(".")
    if module in HEADS:
        return f"{HEADS[module]}.{kind}" if kind in ("weight", "bias") else None
    if (place := _STACK.fullmatch(name)) and (place["stack"] or "encoder") in names.stacks:
        stack, rest = names.stacks[place["stack"] or "encoder"], place["rest"]
        prefix = stack.prefix
        if layer := _LAYER.fullmatch(rest):
            inner = rename_block(layer[2], stack.block)
            return inner and f"{prefix}layers.{first_layer + int(layer[1])}.{inner}"
        module, _, kind = rest.rpartition(".")
        known = module in _LAST and kind in ("weight", "bias")
        return f"{prefix}{_LAST[module]}.{kind}" if known else None
    module, _, kind = name.removeprefix("language_model.").rpartition(".")
    known = module in OUTER and kind in ("weight", "bias")
    return f"{OUTER[module]}.{kind}" if known else None


def to_megatron(name: str, first_layer: int = 0, names: FamilyNames = GPT) -> str | None:
    """Return the name in Megatron-LM 3, or None if it has no such parameter: the inverse of
    :func:`rename`."""
    if names is not GPT and name in BIASES:
        return BIASES[name]
    for stack, (prefix, _, _, block) in names.stacks.items():
        module, _, kind = name.removeprefix(prefix).rpartition(".")
        if not name.startswith(prefix):
            continue
        if layer := _LAYER.fullmatch(module):
            name_there = _inverse(block).get(layer[2])
            number = int(layer[1]) - first_layer
            return name_there and f"language_model.{stack}.layers.{number}.{name_there}.{kind}"
        if name_there := _inverse(_LAST).get(module):
            return f"language_model.{stack}.{name_there}.{kind}"
    module, _, kind = name.rpartition(".")
    if module in _inverse(HEADS):
        return f"{_inverse(HEADS)[module]}.{kind}"
    name_there = _inverse(OUTER).get(module)
    return name_there and f"language_model.{name_there}.{kind}"


def to_core(name: str, first_layer: int = 0, experts: bool = False) -> str | None:
    """Return the name of a GPT parameter in Megatron's core library, or None if the library lacks
    it. ``name`` is canonical, with an index for an expert. The library stores norms in the linear
    layers after them, except for the norm before experts in blocks with ``experts``."""
    block = _LAYER.fullmatch(name)
    module, _, kind = name.rpartition(".")
    if block is None:
        if module in _inverse(_LAST):
            return f"decoder.{_inverse(_LAST)[module]}.{kind}"
        theirs = _inverse(OUTER).get(module)
        return theirs and f"{theirs}.{kind}"
    module, _, kind = block[2].rpartition(".")
    theirs = core_expert_name(block[2])
    if theirs is None and module == "mlp_norm" and experts:
        theirs = f"pre_mlp_layernorm.{kind}"
    elif theirs is None and module in _inverse(CORE_BLOCK):
        theirs = f"{_inverse(CORE_BLOCK)[module]}.{kind}"
        theirs = theirs.replace(".layer_norm.", ".layer_norm_")
    if theirs is None:
        return None
    return f"decoder.layers.{int(block[1]) - first_layer}.{theirs}"


def _inverse(table: Mapping[str, str]) -> dict[str, str]:
    """Invert a table. Return Megatron's first name for each canonical name."""
    return {canonical: theirs for theirs, canonical in reversed(list(table.items()))}


def qkv_from_megatron(
    values: Tensor, version: float, heads: int, groups: int, head_dim: int
) -> Tensor:
    """Reorder the rows of a query-key-value matrix or bias to the canonical order: all queries, all
    keys, all values, with heads in order.

    Megatron's order depends on its checkpoint version: 0 is [3, heads, head_dim], 1 is [heads,
    head_dim, 3], and from 2 on it is [groups, heads / groups queries + key + value, head_dim]. The
    shard of each tensor-parallel rank has this order, so shards are converted one by one, with
    their own numbers of heads. Raises ValueError if the number of rows is wrong, or if the version
    does not support grouped queries.
    """
    _check_rows(values, version, heads, groups, head_dim)
    return _from_megatron(values, version, groups, head_dim, (heads // groups, 1, 1))


def qkv_to_megatron(
    values: Tensor, version: float, heads: int, groups: int, head_dim: int
) -> Tensor:
    """Reorder the rows to Megatron's order: the inverse of :func:`qkv_from_megatron`."""
    _check_rows(values, version, heads, groups, head_dim)
    return _to_megatron(values, version, groups, head_dim, (heads // groups, 1, 1))


def kv_from_megatron(values: Tensor, version: float, heads: int, head_dim: int) -> Tensor:
    """Reorder the rows of a cross-attention key-value matrix or bias to the canonical order."""
    _check_kv_rows(values, heads, head_dim)
    return _from_megatron(values, version, heads, head_dim, (1, 1))


def kv_to_megatron(values: Tensor, version: float, heads: int, head_dim: int) -> Tensor:
    """Reorder the rows to Megatron's order: the inverse of :func:`kv_from_megatron`."""
    _check_kv_rows(values, heads, head_dim)
    return _to_megatron(values, version, heads, head_dim, (1, 1))


def _from_megatron(
    values: Tensor, version: float, groups: int, head_dim: int, parts: tuple[int, ...]
) -> Tensor:
    """Reorder rows to the canonical order. ``parts`` has the number of heads per group for queries,
    keys and values, or for keys and values."""
    rest = values.shape[1:]
    if version < 1:
        return values.clone()
    if version < 2:
        per_head = values.reshape(groups, head_dim, len(parts), *rest)
        return per_head.movedim(2, 0).reshape(values.shape)
    per_group = values.reshape(groups, sum(parts), head_dim, *rest)
    return torch.cat([part.reshape(-1, *rest) for part in per_group.split(parts, dim=1)])


def _to_megatron(
    values: Tensor, version: float, groups: int, head_dim: int, parts: tuple[int, ...]
) -> Tensor:
    rest = values.shape[1:]
    if version < 1:
        return values.clone()
    if version < 2:
        by_part = values.reshape(len(parts), groups, head_dim, *rest)
        return by_part.movedim(0, 2).reshape(values.shape)
    split = values.split([groups * part * head_dim for part in parts])
    per_group = [part.reshape(groups, -1, head_dim, *rest) for part in split]
    return torch.cat(per_group, dim=1).reshape(values.shape)


def _check_kv_rows(values: Tensor, heads: int, head_dim: int) -> None:
    if values.shape[0] != 2 * heads * head_dim:
        raise ValueError(
            f"the key-value rows are {values.shape[0]}; {heads} heads of {head_dim} have "
            f"{2 * heads * head_dim}"
        )


def _check_rows(values: Tensor, version: float, heads: int, groups: int, head_dim: int) -> None:
    if version < 2 and groups != heads:
        raise ValueError(
            f"checkpoint version {version:g} has no grouped queries, but there are {heads} query "
            f"heads and {groups} key and value heads"
        )
    if heads % groups:
        raise ValueError(f"{groups} key and value heads do not divide {heads} query heads")
    rows = (heads + 2 * groups) * head_dim
    if values.shape[0] != rows:
        raise ValueError(
            f"the query-key-value rows are {values.shape[0]}; {heads} query heads and {groups} key "
            f"and value heads of {head_dim} have {rows}"
        )
