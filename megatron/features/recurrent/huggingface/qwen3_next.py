"""Qwen3-Next, and the text models of Qwen3.5 with and without experts. Most blocks have Gated
DeltaNet. The others have attention with an output gate, and RoPE on some channels of each head.

Shapes: K query and key heads, R value heads for each, D key width, V value width, H hidden size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.config import ModelConfig
from megatron.config.patterns import pattern_text
from megatron.features.experts.huggingface.llama import read_pattern, write_pattern
from megatron.features.experts.huggingface.parts import (
    CHOICES,
    DENSE,
    INNER,
    LLAMA_EXPERTS,
    experts_in,
    normalised,
    read_experts,
    read_normalisation,
    requirements,
    router,
    shared_experts,
    write_experts,
)
from megatron.features.recurrent.flags import DeltaConfig
from megatron.features.recurrent.huggingface.bamba import (
    CHANNELS,
    at,
    attention_entries,
    with_mixer,
)
from megatron.features.recurrent.pattern import ATTENTION, DELTA, MAMBA, PatternConfig
from megatron.formats.features import Requirement
from megatron.formats.huggingface.ahead import QWEN_AHEAD
from megatron.formats.huggingface.architecture import Architecture, Tensors
from megatron.formats.huggingface.config_reader import FULL, HFConfigReader, read_rope, write_rope
from megatron.formats.huggingface.entries import (
    SAME,
    Entry,
    Modules,
    Reordering,
    attention_biased,
    decoder_entries,
    norm,
)
from megatron.formats.huggingface.llama import (
    ACTIVATION,
    FIXED,
    HEAD_DIM,
    KEYS,
    NO_BIASES,
    QK_NORMS,
    gated_mlp,
)

LINEAR = "linear_attention"


def _rows(model: ModelConfig) -> list[int]:
    """Return the numbers of rows of queries, keys, values, gate, stored fractions and decays."""
    part = model.part(DeltaConfig)
    heads = part.linear_num_value_heads
    return [part.key_width, part.key_width, part.value_width, part.value_width, heads, heads]


def _by_head(parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
    """Interleave the rows of several matrices by key head."""
    heads = model.part(DeltaConfig).linear_num_key_heads
    return torch.cat([part.unflatten(0, (heads, -1)) for part in parts], 1).flatten(0, 1)


def _from_heads(values: Tensor, rows: Sequence[int], model: ModelConfig) -> Tensor:
    heads = model.part(DeltaConfig).linear_num_key_heads
    parts = values.unflatten(0, (heads, -1)).split([count // heads for count in rows], 1)
    return torch.cat([part.flatten(0, 1) for part in parts])


def _of_rows(first: int, end: int) -> Reordering:
    """Return the reordering by key head of matrices ``first`` to ``end`` - 1 of the input
    projection."""
    return Reordering(
        "by key head", 1,
        lambda values, model: (_by_head(values.split(_rows(model)[first:end]), model),),
        lambda parts, model: _from_heads(parts[0], _rows(model)[first:end], model),
    )  # fmt: skip


_QKVZ, _BA = _of_rows(0, 4), _of_rows(4, 6)


def _to_heads(values: Tensor, model: ModelConfig) -> Sequence[Tensor]:
    rows = _rows(model)
    qkvz, ba = values.split([sum(rows[:4]), sum(rows[4:])])
    return *_QKVZ.to_hf(qkvz, model), *_BA.to_hf(ba, model)


def _from_both(tensors: Sequence[Tensor], model: ModelConfig) -> Tensor:
    qkvz, ba = tensors
    return torch.cat([_QKVZ.from_hf([qkvz], model), _BA.from_hf([ba], model)])


def _to_four(values: Tensor, model: ModelConfig) -> Sequence[Tensor]:
    rows = _rows(model)
    return values.split([sum(rows[:3]), *rows[3:]])


def _both(model: ModelConfig) -> Sequence[Modules]:
    rows = _rows(model)
    return ("qkvz", (0, 1, 2, 3), sum(rows[:4]), _QKVZ), ("ba", (4, 5), sum(rows[4:]), _BA)


def _four(model: ModelConfig) -> Sequence[Modules]:
    rows = _rows(model)
    places = [("qkv", (0, 1, 2)), ("z", (3,)), ("b", (4,)), ("a", (5,))]
    return [(name, at, sum(rows[place] for place in at), SAME) for name, at in places]


BY_KEY_HEAD = Reordering(
    "q, k, v, z and b, a by key head", 2, _to_heads, _from_both, modules=_both
)  # fmt: skip
"""Projections of Qwen3-Next: [K, 2 D + 2 R V, H] and [K, 2 R, H]."""
FOUR = Reordering(
    "q, k, v; z; b; a", 4, _to_four, lambda tensors, _: torch.cat(list(tensors)), modules=_four
)
"""Projections of Qwen3.5, whose rows have the same order as in this project."""


def delta_entries(theirs: str, form: Reordering, *names: str) -> tuple[Entry, ...]:
    """Return the entries of Gated DeltaNet layers. ``theirs`` is the name of the module in
    checkpoint files, and ``names`` are its projections."""
    projections = tuple(f"{theirs}.{name}.weight" for name in names)
    return at(
        with_mixer(DELTA),
        Entry("attention.in_proj.weight", projections, form),
        Entry("attention.conv.weight", (f"{theirs}.conv1d.weight",), CHANNELS),
        Entry("attention.dt_bias", (f"{theirs}.dt_bias",)),
        Entry("attention.a_log", (f"{theirs}.A_log",)),
        Entry("attention.norm.weight", (f"{theirs}.norm.weight",)),
        Entry("attention.out_proj.weight", (f"{theirs}.out_proj.weight",)),
    )


_NEXT = delta_entries("linear_attn", BY_KEY_HEAD, "in_proj_qkvz", "in_proj_ba")
_NEXT_3_5 = delta_entries("linear_attn", FOUR, *(f"in_proj_{name}" for name in ("qkv", *"zba")))
_SPARSE = (
    *router("mlp.gate.weight"),
    *LLAMA_EXPERTS,
    *shared_experts("mlp.shared_expert"),
    Entry("mlp.shared_gate.weight", ("mlp.shared_expert_gate.weight",), at=experts_in),
)


def _entries(delta: Sequence[Entry], mlp: Sequence[Entry]) -> tuple[Entry, ...]:
    return decoder_entries(
        "model.embed_tokens",
        "model.layers.{n}",
        "model.norm",
        norm("attention_norm", "input_layernorm"),
        norm("mlp_norm", "post_attention_layernorm"),
        delta,
        attention_entries("self_attn", attention_biased),
        _ATTENTION_NORMS,
        mlp,
    )


_ATTENTION_NORMS = at(with_mixer(ATTENTION), *QK_NORMS)
_SIZES = (
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim",
    "linear_num_key_heads", "linear_num_value_heads",
)  # fmt: skip
_KEYS = (
    KEYS | HEAD_DIM | ACTIVATION | {name: name for name in _SIZES}
    | {"attention_bias": "add_attention_bias"}
)  # fmt: skip
_SHARED = {"shared_expert_intermediate_size": "moe_shared_expert_intermediate_size"}
_SPARSE_KEYS = _KEYS | CHOICES | INNER | _SHARED
_FIXED = FIXED | NO_BIASES | {
    "apply_layernorm_1p": True, "qk_layernorm": True, "attention_output_gate": True,
}  # fmt: skip
_SPARSE_FIXED = _FIXED | {"moe_shared_expert_gate": True}
_FEATURES = frozenset({"mixers", "rotary_percent", "rope_scaling"})
_OF_EXPERTS = ("moe_shared_expert_intermediate_size", "moe_shared_expert_gate")


def _delta_and_attention(model: ModelConfig) -> bool:
    part = model.part(PatternConfig)
    return part.hybrid_layer_pattern is None and DELTA in part.mixers and MAMBA not in part.mixers


_LAYERS = (
    Requirement(_delta_and_attention, "--experimental-attention-variant gated_delta_net"),
    Requirement(
        lambda m: not m.blocks_ahead or m.part(PatternConfig).mixers[-1:] == (ATTENTION,),
        "with --mtp-num-layers attention in the last layer",
    ),
)
"""Multi-token prediction blocks are like the last block, which has attention in these models."""


def _write(model: ModelConfig) -> dict[str, Any]:
    mixers = model.part(PatternConfig).mixers
    return {
        **write_rope(model, share_key="partial_rotary_factor"),
        "layer_types": [LINEAR if mixer == DELTA else FULL for mixer in mixers],
    }


def _read(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    layers, every = fields["num_layers"], given.content.get("full_attention_interval") or 4
    given.unused("full_attention_interval", "mamba_ssm_dtype", "attn_output_gate")
    given.only("attn_output_gate", (True, None), "attention's output has a gate in such models")
    kinds = given.names("layer_types")
    if kinds is None:
        kinds = [FULL if (n + 1) % every == 0 else LINEAR for n in range(layers)]
    if len(kinds) != layers or not set(kinds) <= {FULL, LINEAR} or LINEAR not in kinds:
        why = f"expected {LINEAR} or {FULL} for each of {layers} blocks, and some {LINEAR}"
        given.refuse("layer_types", kinds, why)
    return {
        **read_rope(given, fields, share_key="partial_rotary_factor", share=0.25),
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": pattern_text(kind == LINEAR for kind in kinds),
    }


def _read_next(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    sparse = read_pattern(given, fields)
    return {
        **_read(given, fields),
        **read_experts(given, fields, ("num_experts", "num_local_experts"), sparse),
        **read_normalisation(given, fields),
    }


def _read_grids(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the flags of :func:`_read`. RoPE sections for images are dropped, because text has the
    same position in each section."""
    rope = given.content.get("rope_parameters")
    if isinstance(rope, dict):
        of_images = ("mrope_section", "mrope_interleaved")
        plain = {name: value for name, value in rope.items() if name not in of_images}
        given.content = {**given.content, "rope_parameters": plain}
    given.unused("mtp_use_dedicated_embeddings")
    return _read(given, fields)


def _text_part(content: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the text model's config.json, extracted from that of a model that also reads
    images."""
    text = content.get("text_config")
    if not isinstance(text, dict):
        return content
    shared = ("architectures", "dtype", "tie_word_embeddings")
    return text | {name: content[name] for name in shared if name in content}


def _read_sparse(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    given.unused("intermediate_size")  # size of dense MLPs, which these models lack
    return {
        **_read_grids(given, fields),
        **read_experts(given, fields, ("num_experts", "num_local_experts")),
        **read_normalisation(given, fields, summing=True),
    }


QWEN3_NEXT = Architecture(
    title="Qwen3-Next",
    model_type="qwen3_next",
    model_class="Qwen3NextForCausalLM",
    entries=_entries(_NEXT, (*DENSE, *_SPARSE)),
    keys=_SPARSE_KEYS,
    fixed=_SPARSE_FIXED,
    features=_FEATURES | {"layer_experts"},
    gated=True,
    requirements=(*_LAYERS, *requirements(*_OF_EXPERTS, dense=True)),
    write=lambda model: {
        **_write(model),
        **write_experts(model, "num_experts"),
        **write_pattern(model),
        "norm_topk_prob": normalised(model),
    },
    read=_read_next,
    ahead=dataclasses.replace(QWEN_AHEAD, keys=QWEN_AHEAD.keys[::-1]),
)
_OF_IMAGES: dict[str, Any] = {
    "seen": _text_part,
    "beginnings": {"model.": "model.language_model."},
    "predicting": lambda model: r"model\.visual\..*",
    "ahead": QWEN_AHEAD,
}
QWEN3_5 = Architecture(
    title="Qwen3.5",
    model_type="qwen3_5_text",
    model_class="Qwen3_5ForCausalLM",
    entries=_entries(_NEXT_3_5, gated_mlp("mlp", "mlp")),
    keys=_KEYS,
    fixed=_FIXED,
    features=_FEATURES,
    gated=True,
    requirements=_LAYERS,
    write=_write,
    read=_read_grids,
    other_types=("qwen3_5",),
    **_OF_IMAGES,
)
QWEN3_5_MOE = Architecture(
    title="Qwen3.5-MoE",
    model_type="qwen3_5_moe_text",
    rewards=False,
    model_class="Qwen3_5MoeForCausalLM",
    entries=_entries(_NEXT_3_5, _SPARSE),
    keys={key: field for key, field in _SPARSE_KEYS.items() if key != "intermediate_size"},
    fixed=_SPARSE_FIXED,
    features=_FEATURES | {"layer_experts"},
    gated=True,
    requirements=(*_LAYERS, *requirements(*_OF_EXPERTS, summing=True)),
    write=lambda model: {**_write(model), **write_experts(model, "num_experts")},
    read=_read_sparse,
    other_types=("qwen3_5_moe",),
    **_OF_IMAGES,
)
ARCHITECTURES = (QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE)
