"""Gemma 2 and the text model of Gemma 3.

Norms before and after attention and MLP, which multiply by 1 + weight; GEGLU; scaled embeddings; a
sliding window in most blocks. Gemma 2 has softcaps on attention scores and logits; Gemma 3
normalises queries and keys, and has a rotary base of its own in blocks with a window.
"""

from __future__ import annotations

from typing import Any

from megatron.config import ModelConfig
from megatron.formats.features import Requirement
from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.config_reader import HFConfigReader
from megatron.formats.huggingface.entries import llama_entries, norm
from megatron.formats.huggingface.llama import (
    DIVISIBLE,
    FIXED,
    HEAD_DIM,
    KEYS,
    NO_ATTENTION_BIAS,
    NO_BIASES,
    QK_NORMS,
)
from megatron.formats.huggingface.rope_and_windows import (
    FULL,
    SLIDING,
    agreed,
    layer_types,
    read_rope,
    read_scaling,
    read_windows,
    write_rope,
)

_MLP_NORM = "pre_feedforward_layernorm"
_POST_NORMS = (
    *norm("attention_post_norm", "post_attention_layernorm"),
    *norm("mlp_post_norm", "post_feedforward_layernorm"),
)
_FIXED = FIXED | NO_BIASES | {
    "apply_layernorm_1p": True, "post_norm": True, "scale_embeddings": True,
}  # fmt: skip
_FEATURES = frozenset(
    {"query_pre_attn_scalar", "rope_scaling", "sliding_window", "window_attn_skip_freq"}
)
_SAME_NAME = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
_KEYS = KEYS | HEAD_DIM | {"hidden_activation": "activation"} | {name: name for name in _SAME_NAME}
_WHOLE_SCALAR = Requirement(
    lambda m: float(m.attention.query_pre_attn_scalar).is_integer(),
    "--query-pre-attn-scalar that is an integer",
)
"""Required by the configuration classes."""


def _write_common(model: ModelConfig) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": int(model.attention.query_pre_attn_scalar),
        "attn_logit_softcapping": model.attention.attn_logit_softcapping,
        # Their code requires one even where no block has a window.
        "sliding_window": model.attention.sliding_window or model.positions.max_position_embeddings,
        "layer_types": layer_types(model),
        "attention_bias": False,
        "pad_token_id": None,
        **write_rope(model),
    }


def _read_common(given: HFConfigReader, fields: dict[str, Any], every: int) -> dict[str, Any]:
    """The windows, which every N-th block lacks."""
    given.only("attention_bias", (False,), NO_ATTENTION_BIAS)
    given.only("use_bidirectional_attention", (False, None), "attention must be causal")
    given.unused("hidden_act", "sliding_window_size")  # beside those that are read, in older files
    kinds = [SLIDING if (n + 1) % every else FULL for n in range(fields["num_layers"])]
    return read_windows(given, given.optional_whole("sliding_window"), kinds)


def _read_gemma2(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    return {**_read_common(given, fields, 2), **read_rope(given, fields)}


GEMMA2 = Architecture(
    title="Gemma 2",
    model_type="gemma2",
    model_class="Gemma2ForCausalLM",
    entries=llama_entries(_POST_NORMS, mlp_norm=_MLP_NORM),
    keys=_KEYS,
    fixed=_FIXED,
    features=_FEATURES,
    gated=True,
    requirements=(DIVISIBLE, _WHOLE_SCALAR),
    write=_write_common,
    read=_read_gemma2,
)


def _local_unscaled(model: ModelConfig) -> bool:
    """Whether RoPE is unscaled in blocks with a window: config.json has no scaling for them."""
    return model.attention.sliding_window is None or (
        model.positions.rotary_base_local is not None or model.positions.rope_scaling.is_default
    )


def _write_gemma3(model: ModelConfig) -> dict[str, Any]:
    keys = _write_common(model)
    local = model.positions.rotary_base_local or model.positions.rotary_base
    return keys | {
        "rope_local_base_freq": local,
        "rope_parameters": {
            FULL: keys["rope_parameters"],
            SLIDING: {"rope_type": "default", "rope_theta": local},
        },
        # What transformers 4 reads where it does not know layer_types.
        "sliding_window_pattern": model.attention.window_attn_skip_freq or model.num_layers + 1,
    }


def _read_gemma3(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    given.only(
        "attn_logit_softcapping", (None,),
        "transformers does not softcap the attention scores of such models",
    )  # fmt: skip
    windows = _read_common(
        given, fields, given.whole(("sliding_window_pattern", "_sliding_window_pattern"))
    )
    nested = given.table("rope_parameters")
    if set(nested) - {FULL, SLIDING}:
        given.refuse("rope_parameters", nested, f"expected {FULL} and {SLIDING} alone")
    wide, narrow = (dict(nested.get(kind) or {}) for kind in (FULL, SLIDING))
    if narrow.get("rope_type", narrow.get("type", "default")) != "default":
        given.refuse("rope_parameters", nested, f"RoPE cannot be scaled in {SLIDING}")
    if any(part.get("partial_rotary_factor", 1.0) != 1.0 for part in (wide, narrow)):
        given.refuse("rope_parameters", nested, "such models rotate whole heads")
    local = agreed(given, ("rope_local_base_freq",), narrow.get("rope_theta"), 10_000.0)
    return {
        **windows,
        "rotary_base": agreed(given, ("rope_theta",), wide.get("rope_theta"), 1_000_000.0),
        "rotary_base_local": None if windows["sliding_window"] is None else local,
        "rope_scaling": read_scaling(given, fields, wide),
    }


GEMMA3 = Architecture(
    title="Gemma 3",
    model_type="gemma3_text",
    model_class="Gemma3ForCausalLM",
    entries=llama_entries((*QK_NORMS, *_POST_NORMS), mlp_norm=_MLP_NORM),
    keys={key: field for key, field in _KEYS.items() if key != "attn_logit_softcapping"},
    fixed=_FIXED | {"qk_layernorm": True},
    features=_FEATURES | {"rotary_base_local"},
    gated=True,
    requirements=(
        DIVISIBLE,
        _WHOLE_SCALAR,
        Requirement(_local_unscaled, "--rotary-base-local beside --rope-scaling"),
    ),
    write=_write_gemma3,
    read=_read_gemma3,
    # The second is for versions of transformers that do not know Gemma 3.
    defaults={"sliding_window_pattern": 6, "tie_word_embeddings": True},
)
