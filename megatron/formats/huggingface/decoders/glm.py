"""GLM, GLM-4 and Cohere. RoPE pairs neighbouring channels of a head; GLM rotates only some of them.
Cohere computes attention and MLP in parallel after one norm."""

from __future__ import annotations

from typing import Any

from megatron.config import ModelConfig
from megatron.formats.features import Requirement
from megatron.formats.huggingface.config_reader import (
    FULL,
    SLIDING,
    HFConfigReader,
    read_rope,
    read_windows,
    short,
    write_rope,
)
from megatron.formats.huggingface.decoders.relatives import (
    LAYER_NORM_SIZES,
    ROTATES_IN_WINDOWS,
    all_but_every,
    relative,
    relative_entries,
    rotating,
    without_rope,
)
from megatron.formats.huggingface.entries import norm, weight
from megatron.formats.huggingface.llama import by_kind, gated_mlp, local_base

_INTERLEAVED = {"rotary_interleaved": True}


def _head_normed(model: ModelConfig) -> bool:
    return model.norm.qk_layernorm


_HEAD_NORMS = (
    *weight("attention.q_norm", "self_attn.q_norm", when=_head_normed),
    *weight("attention.k_norm", "self_attn.k_norm", when=_head_normed),
)
_FUSED = gated_mlp("mlp", "mlp", fused=True)

GLM = relative(
    "GLM",
    "glm",
    "GlmForCausalLM",
    relative_entries(mlp=_FUSED),
    fixed=_INTERLEAVED,
    biases=("qkv",),
    share=0.5,
)
"""GLM: rotation of half of each head; gate and up projection in one tensor."""

GLM4 = relative(
    "GLM-4",
    "glm4",
    "Glm4ForCausalLM",
    relative_entries(
        norm("attention_post_norm", "post_self_attn_layernorm"),
        norm("mlp_post_norm", "post_mlp_layernorm"),
        mlp=_FUSED,
    ),
    fixed=_INTERLEAVED | {"post_norm": True},
    biases=("qkv",),
    share=0.5,
)
"""GLM-4: GLM with additional norms after attention and MLP."""


def _read_scale(given: HFConfigReader) -> dict[str, Any]:
    """Return ``logits_scaling``, which divides the logits, as the inverse of ``logit_scale``."""
    scale = given.number("logit_scale")
    if scale <= 0:
        given.refuse("logit_scale", scale, "expected a positive number")
    return {"logits_scaling": None if scale == 1.0 else short(1 / scale)}


def _write_scale(model: ModelConfig) -> dict[str, Any]:
    return {"logit_scale": short(1 / (model.embedding.logits_scaling or 1.0))}


_COHERE = {
    "normalization": "UnbiasedLayerNorm", "parallel_residual": True, "shared_parallel_norm": True,
} | _INTERLEAVED  # fmt: skip
_ONE_NORM = tuple(entry for entry in relative_entries(_HEAD_NORMS) if "mlp_norm" not in entry.ours)


def _read_cohere(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    normed = bool(given.content.get("use_qk_norm"))
    given.unused("use_qk_norm")
    return _read_scale(given) | {"qk_layernorm": normed, "qk_layernorm_per_head": normed}


COHERE = relative(
    "Cohere",
    "cohere",
    "CohereForCausalLM",
    _ONE_NORM,
    keys=LAYER_NORM_SIZES,
    fixed=_COHERE,
    features=("logits_scaling", "qk_layernorm", "qk_layernorm_per_head"),
    biases=("attention",),
    base=500_000.0,
    read=_read_cohere,
    write=lambda model: _write_scale(model) | {"use_qk_norm": model.norm.qk_layernorm},
    requirements=(
        Requirement(
            lambda model: model.norm.qk_layernorm == model.norm.qk_layernorm_per_head,
            "--qk-layernorm-per-head with --qk-layernorm",
        ),
    ),
    rewards=False,
)


def _check_width(given: HFConfigReader, fields: dict[str, Any]) -> None:
    width = fields["hidden_size"] // fields["num_attention_heads"]
    given.only("head_dim", (width, None), f"heads of such models have {width} channels")


def _read_cohere2(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    layers, window = fields["num_layers"], given.optional_whole("sliding_window")
    pattern = given.content.get("sliding_window_pattern", 4)
    given.unused("sliding_window_pattern", "cache_implementation", "order_of_interleaved_layers")
    if not isinstance(pattern, int) or pattern < 1:
        given.refuse("sliding_window_pattern", pattern, "expected a positive integer")
    given.only("use_qk_norm", (False, None), "transformers normalises no queries and keys")
    given.only("rotary_pct", (1.0, 1, None), "such models rotate whole heads")
    _check_width(given, fields)
    kinds = given.names("layer_types") or all_but_every(pattern)(layers)
    flags = _read_scale(given) | read_windows(given, window, kinds)
    return flags | without_rope(kind != SLIDING for kind in kinds)


_COHERE_SIZES = {key: field for key, field in LAYER_NORM_SIZES.items() if key != "head_dim"}
COHERE2 = relative(
    "Cohere 2",
    "cohere2",
    "Cohere2ForCausalLM",
    _ONE_NORM,
    keys=_COHERE_SIZES,
    fixed=_COHERE,
    features=("logits_scaling", "no_rope_freq"),
    biases=("attention",),
    windows=all_but_every(4),
    reads_windows=False,
    read=_read_cohere2,
    write=_write_scale,
    requirements=(ROTATES_IN_WINDOWS,),
    rewards=False,
)
"""Cohere 2: only the blocks with a window rotate queries and keys."""


def _read_compass(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """Read RoPE separately for blocks with and without a window. It is null for blocks without
    RoPE."""
    _check_width(given, fields)
    given.unused("pooling", "head_dim")
    nested, kinds = given.table("rope_parameters"), given.names("layer_types")
    kinds = kinds or [FULL] * fields["num_layers"]
    forms = {kind: nested.get(kind) for kind in (FULL, SLIDING) if kind in {*kinds, *nested}}
    if not set(kinds) <= set(nested) or not all(isinstance(v, dict | None) for v in forms.values()):
        each = " and ".join(sorted({*kinds}))
        given.refuse("rope_parameters", nested, f"expected an object or null for {each}")
    # M-RoPE's sections are for positions in images, which text does not have.
    mrope = ("mrope_section", "mrope_interleaved")
    rotated = {
        kind: {key: value for key, value in form.items() if key not in mrope}
        for kind, form in forms.items()
        if form is not None
    }
    wide, narrow = rotated.get(FULL), rotated.get(SLIDING)
    given.content = given.content | {"rope_parameters": wide or narrow or {}}
    flags = read_rope(given, fields)
    if wide is not None and narrow is not None and narrow != wide:
        given.content = given.content | {"rope_parameters": narrow}
        local = read_rope(given, fields)
        if local["rope_scaling"] is not None:
            given.refuse("rope_parameters", nested, f"RoPE cannot be scaled in {SLIDING} alone")
        flags["rotary_base_local"] = local["rotary_base"]
    if given.content.get("logit_scale") is None:
        given.content = given.content | {"logit_scale": 1.0}
    flags |= _read_scale(given)
    return flags | without_rope(kind not in rotated for kind in kinds)


def _rotated_kinds(model: ModelConfig) -> dict[str, set[bool]]:
    """Return whether blocks rotate queries and keys, as the set of values that occur, for each type
    of attention. The set is empty if the model has no such blocks."""
    each = list(zip(model.windows, rotating(model), strict=True))
    return {
        FULL: {rotates for window, rotates in each if window is None},
        SLIDING: {rotates for window, rotates in each if window is not None},
    }


def _write_compass(model: ModelConfig) -> dict[str, Any]:
    wide, kinds = write_rope(model)["rope_parameters"], _rotated_kinds(model)
    forms = dict.fromkeys(kinds, wide)
    if model.positions.rotary_base_local is not None:
        forms = by_kind(wide, local_base(model))
    unscaled = {"logit_scale": None} if model.embedding.logits_scaling is None else {}
    return (
        _write_scale(model)
        | unscaled
        | {
            "rope_parameters": {
                kind: None if False in kinds[kind] else form for kind, form in forms.items()
            }
        }
    )


COHERE_COMPASS = relative(
    "Cohere Compass",
    "cohere_compass_text",
    "CohereCompassForCausalLM",
    _ONE_NORM,
    keys=_COHERE_SIZES,
    fixed={key: value for key, value in _COHERE.items() if key != "rotary_interleaved"},
    features=("logits_scaling", "no_rope_freq", "rotary_base_local"),
    biases=("attention",),
    windows=lambda layers: [FULL] * layers,
    rope=False,
    read=_read_compass,
    write=_write_compass,
    requirements=(
        Requirement(
            lambda model: all(len(kind) < 2 for kind in _rotated_kinds(model).values()),
            "--no-rope-freq with all blocks with a window, or all without one",
        ),
    ),
    rewards=False,
)
"""Cohere 2 with Llama's pairing of channels, and separate RoPE settings for windowed blocks."""
