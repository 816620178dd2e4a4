"""Hugging Face format of Gemma 4's text model, dense and without per-layer embeddings.

The model differs from Gemma 3 as follows: norms multiply by their weights directly (not by 1 +
weight), blocks without a sliding window have heads of another size and no value projection, values
are normalised, and each block's output is multiplied by a scalar."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

from megatron.config import ConfigError, ModelConfig
from megatron.config.positions import RopeScaling
from megatron.features.global_heads.flags import GlobalHeadsConfig, keys_are_values, of_block
from megatron.formats.features import Requirement
from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.config_reader import (
    FULL,
    SLIDING,
    HFConfigReader,
    agreed,
    layer_types,
    read_biases,
    read_scaling,
    read_windows,
    write_biases,
    write_rope,
)
from megatron.formats.huggingface.entries import (
    SEPARATE_QKV,
    Entry,
    Reordering,
    attention_biased,
    linear,
    norm,
)
from megatron.formats.huggingface.llama import (
    FIXED,
    HEAD_DIM,
    KEYS,
    LOCAL_UNSCALED,
    NO_BIASES,
    QK_NORMS,
    by_kind,
    llama_entries,
    local_base,
)

_BASES = {FULL: 1_000_000.0, SLIDING: 10_000.0}
_PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
_GLOBAL_WIDTH = 512


def _first_global(model: ModelConfig) -> int:
    return next(n for n, window in enumerate(model.windows) if window is None)


_OF_GLOBAL = Reordering(
    SEPARATE_QKV.name, 3,
    lambda values, model: SEPARATE_QKV.to_hf(values, of_block(model, _first_global(model))),
    SEPARATE_QKV.from_hf,
)  # fmt: skip
"""Row order of queries, keys and values in blocks without a window."""


def _qkv() -> tuple[Entry, ...]:
    names = tuple(f"self_attn.{part}_proj" for part in "qkv")

    def has(model: ModelConfig, n: int, local: bool) -> int:
        return (model.attention.window(n) is not None) is local and not keys_are_values(model, n)

    separate = (
        replace(entry, at=partial(has, local=local))
        for local, form in ((True, SEPARATE_QKV), (False, _OF_GLOBAL))
        for entry in linear("attention.qkv", *names, form=form, bias=attention_biased)
    )
    shared = (
        replace(entry, at=keys_are_values)
        for part in "qk"
        for entry in linear(
            f"attention.qkv.{part}", f"self_attn.{part}_proj", bias=attention_biased
        )
    )
    return (*separate, *shared)


def _read_global(given: HFConfigReader, fields: dict[str, Any], kinds: list[str]) -> dict[str, Any]:
    """Return the size and number of heads in blocks without a window, from the two global keys or
    from the settings of each block."""
    shared = given.content.get("attention_k_eq_v", False)
    given.unused("attention_k_eq_v", "global_head_dim", "num_global_key_value_heads",
                 "per_layer_config")  # fmt: skip
    layers = given.table("per_layer_config")
    if given.content.get("per_layer_config") is None:
        width = given.content.get("global_head_dim", _GLOBAL_WIDTH)
        groups = given.content.get("num_global_key_value_heads") if shared else None
        chosen = {"head_dim": width} | ({} if groups is None else {"num_key_value_heads": groups})
    else:
        wanted = [n for n, kind in enumerate(kinds) if kind == FULL]
        # transformers zero-pads block indices to the width of the last one: "05" and "11".
        numbers = [int(key) if key.isdecimal() else key for key in layers]
        values = [each for each in layers.values() if isinstance(each, dict)]
        same = len(values) == len(layers) and all(each == values[0] for each in values)
        if not same or (layers and numbers != wanted):
            given.refuse(
                "per_layer_config",
                layers,
                f"expected the same for the blocks {', '.join(map(str, wanted))}",
            )
        chosen = values[0] if values else {}
    if unknown := chosen.keys() - {"head_dim", "num_key_value_heads"}:
        given.refuse("per_layer_config", layers, f"{', '.join(sorted(unknown))} is not known")
    for name, value in chosen.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            given.refuse("per_layer_config", layers, f"{name} must be a positive integer")
    width, groups = chosen.get("head_dim"), chosen.get("num_key_value_heads")
    return {
        "global_kv_channels": None if width == fields["kv_channels"] else width,
        "global_num_query_groups": None if groups == fields["num_query_groups"] else groups,
        "global_keys_as_values": bool(shared),
    }


def _read(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    for name, why in (
        ("hidden_size_per_layer_input", "embeddings of each layer cannot be represented"),
        ("num_kv_shared_layers", "blocks cannot share keys and values"),
        ("enable_moe_block", "experts next to an MLP cannot be represented"),
    ):
        if given.content.get(name, given.default(name)):
            given.refuse(name, given.content.get(name, given.default(name)), why)
        given.unused(name)
    given.only("use_bidirectional_attention", ("vision", None), "attention must be causal")
    given.unused(
        "vocab_size_per_layer_input", "use_double_wide_mlp", "num_experts", "top_k_experts",
        "moe_intermediate_size",
    )  # fmt: skip
    layers = fields["num_layers"]
    kinds = [SLIDING if (n + 1) % 6 else FULL for n in range(layers)]
    kinds = given.names("layer_types") or [*kinds[:-1], FULL]
    if kinds[-1:] != [FULL]:
        given.refuse("layer_types", kinds, f"transformers makes the last block {FULL}")
    windows = read_windows(given, given.optional_whole("sliding_window"), kinds)
    heads = _read_global(given, fields, kinds)
    fields = fields | {"kv_channels": heads["global_kv_channels"] or fields["kv_channels"]}
    return {
        **windows,
        **heads,
        **read_biases(given, ("attention",)),
        **_read_ropes(given, fields, windows["sliding_window"] is not None),
    }


def _read_ropes(given: HFConfigReader, fields: dict[str, Any], local: bool) -> dict[str, Any]:
    """Return the RoPE settings for blocks with and without a window. ``local``: some have one."""
    ropes = given.table("rope_parameters") or {FULL: _PROPORTIONAL}
    wide, narrow = (
        rope if isinstance(rope := ropes.get(kind) or {}, dict) else {"rope_type": rope}
        for kind in (FULL, SLIDING)
    )
    if ropes.keys() - {FULL, SLIDING} or narrow.get("rope_type", "default") != "default":
        given.refuse("rope_parameters", ropes, f"expected {FULL} and {SLIDING}, unscaled")
    bases = {
        kind: agreed(given, ("rope_theta",), rope.get("rope_theta"), _BASES[kind])
        for kind, rope in ((FULL, wide), (SLIDING, narrow))
    }
    share = wide.get("partial_rotary_factor")
    if wide.get("rope_type") == "proportional":
        text = json.dumps({"rope_type": "proportional", "partial_rotary_factor": share})
        try:
            scaling: str | None = RopeScaling.parse(text, 0).to_json()
        except ConfigError as error:
            given.refuse("rope_parameters", ropes, str(error))
    else:
        scaling = read_scaling(given, fields, wide)
        if share not in (None, 1.0):
            given.refuse("rope_parameters", ropes, "such models rotate whole heads")
    return {
        "rotary_base": bases[FULL],
        "rotary_base_local": bases[SLIDING] if local else None,
        "rope_scaling": scaling,
    }


def _write(model: ModelConfig) -> dict[str, Any]:
    part, attention = model.part(GlobalHeadsConfig), model.attention
    local = _BASES[SLIDING] if attention.sliding_window is None else local_base(model)
    groups = part.global_num_query_groups or attention.num_query_groups
    return {
        **write_biases(model, ("attention",)),
        "global_head_dim": part.global_kv_channels or attention.kv_channels,
        "num_global_key_value_heads": groups if part.global_keys_as_values else None,
        "attention_k_eq_v": part.global_keys_as_values,
        "sliding_window": attention.sliding_window or model.positions.max_position_embeddings,
        "layer_types": layer_types(model),
        "rope_parameters": by_kind(write_rope(model)["rope_parameters"], local),
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "enable_moe_block": False,
        "pad_token_id": None,
    }


def _groups_by_key(model: ModelConfig) -> bool:
    part = model.part(GlobalHeadsConfig)
    return part.global_num_query_groups is None or part.global_keys_as_values


GEMMA4 = Architecture(
    title="Gemma 4",
    model_type="gemma4_text",
    model_class="Gemma4ForCausalLM",
    entries=llama_entries(
        QK_NORMS,
        norm("attention_post_norm", "post_attention_layernorm"),
        norm("mlp_post_norm", "post_feedforward_layernorm"),
        [Entry("scalar", ("layer_scalar",))],
        mlp_norm="pre_feedforward_layernorm",
        qkv=_qkv(),
        proj_bias=attention_biased,
    ),
    keys=KEYS | HEAD_DIM | {
        "hidden_activation": "activation", "final_logit_softcapping": "final_logit_softcapping",
    },
    fixed=FIXED | NO_BIASES | {
        "post_norm": True, "scale_embeddings": True, "qk_layernorm": True, "value_norm": True,
        "block_scalar": True, "query_pre_attn_scalar": 1.0,
    },
    features=frozenset(
        {"rope_scaling", "sliding_window", "window_attn_skip_freq", "rotary_base_local",
         "add_attention_bias", "global_kv_channels", "global_num_query_groups",
         "global_keys_as_values"}
    ),
    gated=True,
    requirements=(
        LOCAL_UNSCALED,
        Requirement(
            lambda m: m.windows[-1] is None,
            "--window-attn-skip-freq without a window in the last block",
        ),
        Requirement(_groups_by_key, "--global-keys-as-values with --global-num-query-groups"),
    ),
    read=_read,
    write=_write,
    rewards=False,
)  # fmt: skip
