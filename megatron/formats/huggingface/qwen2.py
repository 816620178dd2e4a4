"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values alone."""

from __future__ import annotations

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
    llama_block,
    qkv_biased,
    read_rms,
    read_shape,
    write_shape,
)
from megatron.formats.huggingface.rope import read_rope, write_rope
from megatron.formats.huggingface.settings import HFConfigReader
from megatron.formats.huggingface.table import Architecture
from megatron.formats.huggingface.windows import FULL, SLIDING, layer_types, read_windows


def write_qwen(model: ModelConfig) -> dict[str, Any]:
    """The keys that Qwen2 and Qwen3 have in common."""
    kinds = layer_types(model)
    return {
        **write_shape(model),
        "hidden_act": GATE_NAMES[model.mlp.activation],
        "use_sliding_window": SLIDING in kinds,
        "sliding_window": model.attention.sliding_window,
        # Where layer_types is not read: the first block with a window, all later ones have it too.
        "max_window_layers": kinds.index(SLIDING) if SLIDING in kinds else model.num_layers,
        "layer_types": kinds,
        **write_rope(model),
    }


def read_qwen(given: HFConfigReader, head_dim: int | None) -> dict[str, Any]:
    """The fields that Qwen2 and Qwen3 have in common."""
    shape = read_shape(given, 4096, 22016, 32, 32, 32, 32768, head_dim)
    used = given.flag("use_sliding_window", False)
    window = given.optional_whole("sliding_window", 4096)
    bound = given.content.get("max_window_layers", 28)
    given.unused("max_window_layers")
    if not isinstance(bound, int):
        given.refuse("max_window_layers", bound, "it must be a whole number")
    default = [
        SLIDING if used and window is not None and n >= bound else FULL
        for n in range(shape["num_layers"])
    ]
    return {
        **shape,
        **read_rms(given, 1e-6),
        **read_rope(given, shape["kv_channels"], shape["max_position_embeddings"], 10000.0),
        **read_windows(given, window if used else None, default),
    }


def _read(given: HFConfigReader) -> dict[str, Any]:
    return {**read_qwen(given, None), "add_qkv_bias": True}


QWEN2 = Architecture(
    title="Qwen2",
    model_type="qwen2",
    causal_lm="Qwen2ForCausalLM",
    entries=(*EMBEDDING, *llama_block(qkv_bias=qkv_biased), *FINAL),
    requirements=(
        ROPE,
        RMS_NORM,
        GATED,
        NO_BIASES,
        Requirement(qkv_biased, "--add-qkv-bias"),
    ),
    features=frozenset({"grouped", "qkv_bias", "rope_scaling", "window", "window_pattern"}),
    write=write_qwen,
    read=_read,
    vocab_size=151936,
    tied=False,
)
"""The table of Qwen2."""
