"""Qwen3: Llama without biases that normalises each head's queries and keys."""

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
from megatron.formats.huggingface.parts import EMBEDDING, FINAL, llama_block, norm
from megatron.formats.huggingface.qwen2 import read_qwen, write_qwen
from megatron.formats.huggingface.settings import HFConfigReader
from megatron.formats.huggingface.table import Architecture, Entry

QK_NORM = Requirement(lambda m: m.norm.qk_layernorm, "--qk-layernorm")
QK_NORMS: tuple[Entry, ...] = (
    *norm("attention.q_norm", "self_attn.q_norm"),
    *norm("attention.k_norm", "self_attn.k_norm"),
)


def _write(model: ModelConfig) -> dict[str, Any]:
    return {**write_qwen(model), "head_dim": model.attention.kv_channels, "attention_bias": False}


def _read(given: HFConfigReader) -> dict[str, Any]:
    given.only("attention_bias", (False,), "here all linear layers have biases or none has")
    return {**read_qwen(given, 128), "qk_layernorm": True}


QWEN3 = Architecture(
    title="Qwen3",
    model_type="qwen3",
    causal_lm="Qwen3ForCausalLM",
    entries=(*EMBEDDING, *llama_block(QK_NORMS), *FINAL),
    requirements=(ROPE, RMS_NORM, GATED, NO_BIASES, QK_NORM),
    features=frozenset(
        {"grouped", "head_dim", "qk_norm", "rope_scaling", "window", "window_pattern"}
    ),
    write=_write,
    read=_read,
    vocab_size=151936,
    tied=False,
)
"""The table of Qwen3."""
