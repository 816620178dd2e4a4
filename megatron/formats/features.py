"""Which features a network has beyond the plain pre-norm transformer.

Each format lists the features that it can express, so that a network with another one is refused
instead of being written wrongly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from megatron.config import ModelConfig, ModelFlags
from megatron.config.flags import flag_of

FEATURES = (
    "num_query_groups", "kv_channels", "add_qkv_bias", "add_attention_bias",
    "position_embedding_offset", "rotary_percent", "rope_scaling", "rotary_base_local",
    "sliding_window", "window_attn_skip_freq", "query_pre_attn_scalar", "attn_logit_softcapping",
    "final_logit_softcapping", "qk_layernorm", "apply_layernorm_1p", "embed_layernorm",
    "scale_embeddings", "scale_head_input", "post_norm",
    "apply_residual_connection_post_layernorm", "parallel_residual", "shared_parallel_norm",
    "num_tokentypes", "lm_head_activation", "head", "retro_add_retriever",
)  # fmt: skip
"""The features, as fields of :class:`ModelFlags`."""

_FIELDS = {field.name: field for field in dataclasses.fields(ModelFlags)}
_PLAIN = {
    "num_query_groups": "--num-query-groups equal to --num-attention-heads",
    "kv_channels": "--num-attention-heads times --kv-channels equal to --hidden-size",
    "rotary_percent": "--rotary-percent 1.0",
    "head": "the head of a language model",
}


class Requirement(NamedTuple):
    """A condition on a network, and the flags that fulfil it."""

    holds: Callable[[ModelConfig], bool]
    wanted: str


def features_of(model: ModelConfig) -> set[str]:
    """The members of :data:`FEATURES` that a network has."""
    flags, attention, positions = model.flags(), model.attention, model.positions
    heads, windows = attention.num_attention_heads, attention.sliding_window is not None
    found = {name for name in FEATURES if getattr(flags, name) != _FIELDS[name].default}
    has = {
        "num_query_groups": attention.num_query_groups != heads,
        "kv_channels": heads * attention.kv_channels != model.hidden_size,
        # Without rotary positions, or without windows, these have no effect.
        "rotary_percent": positions.position_embedding_type == "rope",
        "rotary_base_local": windows,
        "window_attn_skip_freq": windows,
    }
    return {name for name in found if has.get(name, True)}


def without(feature: str) -> str:
    """The flags of a network that lacks a feature."""
    return _PLAIN.get(feature, f"no {flag_of(_FIELDS[feature])}")


def spelled(name: str, value: Any) -> str:
    """The flag that gives a field of :class:`ModelFlags` a value."""
    flag = flag_of(_FIELDS[name])
    if isinstance(value, bool):
        return flag if value != _FIELDS[name].default else f"no {flag}"
    return f"{flag} {value}"
