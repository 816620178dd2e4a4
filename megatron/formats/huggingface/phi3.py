"""Phi-3 and Phi-4: Llama without biases, part of each head rotated; query, key and value are one
tensor, gate and up are one too, both in our order."""

from __future__ import annotations

import json
from typing import Any

from megatron.config import ModelConfig
from megatron.formats.huggingface.features import (
    GATED,
    NO_BIASES,
    RMS_NORM,
    ROPE,
    Requirement,
)
from megatron.formats.huggingface.parts import (
    EMBEDDING,
    FINAL,
    GATE_NAMES,
    block,
    linear,
    norm,
    read_rms,
    read_shape,
    write_shape,
)
from megatron.formats.huggingface.rope import read_rope, write_rope
from megatron.formats.huggingface.settings import HFConfigReader
from megatron.formats.huggingface.table import Architecture

_ORIGINAL = "original_max_position_embeddings"
_SCALING = {"rope_type", "short_factor", "long_factor", _ORIGINAL}


def _longrope_only(model: ModelConfig) -> bool:
    scaling = model.positions.rope_scaling
    return scaling.is_default or set(json.loads(scaling.to_json())) == _SCALING


def _write(model: ModelConfig) -> dict[str, Any]:
    rope = write_rope(model)
    rope["rope_parameters"]["partial_rotary_factor"] = model.positions.rotary_percent
    if not model.positions.rope_scaling.is_default:
        # transformers 4 wants these three keys and no other, and the length beside them.
        scaling = rope["rope_scaling"]
        rope[_ORIGINAL] = scaling[_ORIGINAL]
        rope["rope_scaling"] = {
            "type": "longrope",
            "short_factor": scaling["short_factor"],
            "long_factor": scaling["long_factor"],
        }
    else:
        rope[_ORIGINAL] = model.positions.max_position_embeddings
    return {
        **write_shape(model),
        "hidden_act": GATE_NAMES[model.mlp.activation],
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": 0.0,
        "sliding_window": model.attention.sliding_window,
        "partial_rotary_factor": model.positions.rotary_percent,
        # The default is a token that a small vocabulary does not have.
        "pad_token_id": None,
        **rope,
    }


def _read(given: HFConfigReader) -> dict[str, Any]:
    given.unused("embd_pdrop")
    for name in ("full_attn_mod", "interpolate_factor"):
        given.only(name, (1,), "transformers does not read it")
    given.only("attention_bias", (False,), "here all linear layers have biases or none has")
    shape = read_shape(given, 3072, 8192, 32, 32, None, 4096)
    rope = read_rope(
        given, shape["kv_channels"], shape["max_position_embeddings"], 10000.0,
        share_key="partial_rotary_factor", types={"su": "longrope", "yarn": "longrope"},
    )  # fmt: skip
    return {
        **shape,
        **read_rms(given, 1e-5),
        **rope,
        "hidden_dropout": given.number("resid_pdrop", 0.0),
        "sliding_window": given.optional_whole("sliding_window"),
    }


PHI3 = Architecture(
    title="Phi-3",
    model_type="phi3",
    causal_lm="Phi3ForCausalLM",
    entries=(
        *EMBEDDING,
        *block(
            "model.layers.{n}",
            norm("attention_norm", "input_layernorm"),
            linear("attention.qkv", "self_attn.qkv_proj"),
            linear("attention.proj", "self_attn.o_proj"),
            norm("mlp_norm", "post_attention_layernorm"),
            linear("mlp.up", "mlp.gate_up_proj"),
            linear("mlp.down", "mlp.down_proj"),
        ),
        *FINAL,
    ),
    requirements=(
        ROPE,
        RMS_NORM,
        GATED,
        NO_BIASES,
        Requirement(_longrope_only, f"--rope-scaling with no other keys than {sorted(_SCALING)}"),
    ),
    features=frozenset({"grouped", "partial_rotary", "rope_scaling", "window"}),
    write=_write,
    read=_read,
    vocab_size=32064,
    tied=False,
)
"""The table of Phi-3."""
