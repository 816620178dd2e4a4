"""Gemma 3, the text model: Gemma 2 with normalised queries and keys, and a rotary base of its own
in blocks with a sliding window, which are five of six."""

from __future__ import annotations

import json
from typing import Any

from megatron.config import ModelConfig
from megatron.formats.huggingface.features import Requirement
from megatron.formats.huggingface.gemma2 import (
    GEMMA,
    GEMMA_FEATURES,
    POST_NORMS,
    read_gemma,
    write_gemma,
)
from megatron.formats.huggingface.parts import EMBEDDING, FINAL, llama_block, read_shape
from megatron.formats.huggingface.qwen3 import QK_NORM, QK_NORMS
from megatron.formats.huggingface.rope import read_scaling, write_rope
from megatron.formats.huggingface.settings import HFConfigReader
from megatron.formats.huggingface.table import Architecture
from megatron.formats.huggingface.windows import FULL, SLIDING


def _local_unscaled(model: ModelConfig) -> bool:
    """Whether nothing is stretched in blocks with a window, as there is no way to say it."""
    return model.attention.sliding_window is None or (
        model.positions.rotary_base_local is not None or model.positions.rope_scaling.is_default
    )


def _write(model: ModelConfig) -> dict[str, Any]:
    local = model.positions.rotary_base_local or model.positions.rotary_base
    keys = write_rope(model)
    return {
        **write_gemma(model),
        **keys,
        "rope_local_base_freq": local,
        "rope_parameters": {
            FULL: keys["rope_parameters"],
            SLIDING: {"rope_type": "default", "rope_theta": local},
        },
        # What transformers 4 reads where it does not know layer_types.
        "sliding_window_pattern": model.attention.window_attn_skip_freq or model.num_layers + 1,
    }


def _read(given: HFConfigReader) -> dict[str, Any]:
    given.only(
        "attn_logit_softcapping", (None,), "transformers does not bend the scores of such models"
    )
    shape = read_shape(given, 2304, 9216, 26, 8, 4, 131072, 256)
    every = given.whole(("sliding_window_pattern", "_sliding_window_pattern"), 6)
    fields = read_gemma(given, shape, (None, None), every)
    nested = given.table("rope_parameters") or {}
    wide, narrow = (dict(nested.get(kind) or {}) for kind in (FULL, SLIDING))
    if set(nested) - {FULL, SLIDING}:
        given.refuse("rope_parameters", nested, f"it must have {FULL} and {SLIDING} alone")
    base = _base(given, "rope_theta", wide.pop("rope_theta", None), 1_000_000.0)
    local = _base(given, "rope_local_base_freq", narrow.pop("rope_theta", None), 10_000.0)
    pairs, positions = shape["kv_channels"] // 2, shape["max_position_embeddings"]
    if read_scaling(given, "rope_parameters", narrow, pairs, positions) is not None:
        given.refuse("rope_parameters", nested, f"nothing is stretched in {SLIDING} here")
    older = given.table("rope_scaling")
    forms = [
        read_scaling(given, name, form, pairs, positions)
        for name, form in (("rope_scaling", older), ("rope_parameters", wide))
        if form
    ]
    if len(forms) == 2 and forms[0] != forms[1]:
        given.refuse("rope_scaling", older, f"rope_parameters says otherwise: {json.dumps(nested)}")
    windowed = fields["sliding_window"] is not None
    return {
        **fields,
        "qk_layernorm": True,
        "position_embedding_type": "rope",
        "rotary_base": base,
        "rotary_base_local": local if windowed else None,
        "rope_scaling": forms[0] if forms else None,
    }


def _base(given: HFConfigReader, key: str, newer: Any, default: float) -> float:
    base = given.number(key, default if newer is None else newer)
    if newer is not None and base != newer:
        given.refuse(key, base, f"rope_parameters says {newer!r}; transformers 5 would read that")
    return base


GEMMA3 = Architecture(
    title="Gemma 3",
    model_type="gemma3_text",
    causal_lm="Gemma3ForCausalLM",
    entries=(
        *EMBEDDING,
        *llama_block((*QK_NORMS, *POST_NORMS), mlp_norm="pre_feedforward_layernorm"),
        *FINAL,
    ),
    requirements=(
        *GEMMA,
        QK_NORM,
        Requirement(_local_unscaled, "--rotary-base-local beside --rope-scaling"),
    ),
    features=GEMMA_FEATURES - {"attention_cap"} | {"qk_norm", "local_rope"},
    write=_write,
    read=_read,
    vocab_size=262208,
    tied=True,
)
"""The table of Gemma 3."""
