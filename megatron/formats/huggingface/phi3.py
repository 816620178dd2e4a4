"""Phi-3 and Phi-4: Llama without biases, part of each head rotated; query, key and value are one
tensor, gate and up are one too."""

from __future__ import annotations

import json
from typing import Any

from megatron.config import ModelConfig
from megatron.formats.features import Requirement
from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.config_reader import HFConfigReader
from megatron.formats.huggingface.entries import llama_entries
from megatron.formats.huggingface.llama import (
    ACTIVATION,
    FIXED,
    HEAD_DIM,
    KEYS,
    NO_ATTENTION_BIAS,
    NO_BIASES,
)
from megatron.formats.huggingface.rope_and_windows import read_rope, write_rope

_ORIGINAL = "original_max_position_embeddings"
_SCALING = {"rope_type", "short_factor", "long_factor", _ORIGINAL}


def _longrope_only(model: ModelConfig) -> bool:
    scaling = model.positions.rope_scaling
    return scaling.is_default or set(json.loads(scaling.to_json())) == _SCALING


def _write(model: ModelConfig) -> dict[str, Any]:
    rope, share = write_rope(model), model.positions.rotary_percent
    rope["rope_parameters"]["partial_rotary_factor"] = share
    scaling = rope.get("rope_scaling")
    if scaling is None:
        rope[_ORIGINAL] = model.positions.max_position_embeddings
    else:
        # transformers 4 accepts only these three keys, and the length beside them.
        rope[_ORIGINAL] = scaling[_ORIGINAL]
        factors = {name: scaling[name] for name in ("short_factor", "long_factor")}
        rope["rope_scaling"] = {"type": "longrope", **factors}
    return {
        "embd_pdrop": 0.0,
        "partial_rotary_factor": share,
        # The default is a token that a small vocabulary does not have.
        "pad_token_id": None,
        **rope,
    }


def _read(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    given.unused("embd_pdrop")
    for name in ("full_attn_mod", "interpolate_factor"):
        given.only(name, (1,), "transformers does not read it")
    given.only("attention_bias", (False,), NO_ATTENTION_BIAS)
    return read_rope(
        given, fields, share_key="partial_rotary_factor",
        types={"su": "longrope", "yarn": "longrope"},
    )  # fmt: skip


PHI3 = Architecture(
    title="Phi-3",
    model_type="phi3",
    model_class="Phi3ForCausalLM",
    entries=llama_entries(fused=True),
    keys=KEYS | ACTIVATION | {"resid_pdrop": "hidden_dropout", "sliding_window": "sliding_window"},
    only_read=HEAD_DIM,
    fixed=FIXED | NO_BIASES,
    features=frozenset({"rotary_percent", "rope_scaling"}),
    gated=True,
    requirements=(
        Requirement(_longrope_only, f"--rope-scaling with no other keys than {sorted(_SCALING)}"),
    ),
    write=_write,
    read=_read,
)
