"""Mistral: Llama without biases, with a sliding window in all blocks or in none."""

from __future__ import annotations

from typing import Any

from megatron.config import ModelConfig
from megatron.formats.huggingface.features import GATED, NO_BIASES, RMS_NORM, ROPE
from megatron.formats.huggingface.parts import (
    EMBEDDING,
    FINAL,
    GATE_NAMES,
    llama_block,
    read_rms,
    read_shape,
    write_shape,
)
from megatron.formats.huggingface.rope import read_rope, write_rope
from megatron.formats.huggingface.settings import HFConfigReader
from megatron.formats.huggingface.table import Architecture
from megatron.formats.huggingface.windows import SLIDING


def _write(model: ModelConfig) -> dict[str, Any]:
    return {
        **write_shape(model),
        "head_dim": model.attention.kv_channels,
        "hidden_act": GATE_NAMES[model.mlp.activation],
        "sliding_window": model.attention.sliding_window,
        **write_rope(model),
    }


def _read(given: HFConfigReader) -> dict[str, Any]:
    shape = read_shape(given, 4096, 14336, 32, 32, 8, 131072)
    kinds = [SLIDING] * shape["num_layers"]
    given.only("layer_types", (kinds,), f"all blocks of such models have {SLIDING}")
    return {
        **shape,
        **read_rms(given, 1e-6),
        **read_rope(given, shape["kv_channels"], shape["max_position_embeddings"], 10000.0),
        "sliding_window": given.optional_whole("sliding_window", 4096),
    }


MISTRAL = Architecture(
    title="Mistral",
    model_type="mistral",
    causal_lm="MistralForCausalLM",
    entries=(*EMBEDDING, *llama_block(), *FINAL),
    requirements=(ROPE, RMS_NORM, GATED, NO_BIASES),
    features=frozenset({"grouped", "head_dim", "rope_scaling", "window"}),
    write=_write,
    read=_read,
    vocab_size=32000,
    tied=False,
)
"""The table of Mistral."""
