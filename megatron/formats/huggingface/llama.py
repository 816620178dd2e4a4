"""Llama 1, 2 and 3: rotary positions, RMSNorm, a gated MLP, grouped-query attention, biases
everywhere, in attention alone, or nowhere.

Its query, key and value, and its gate and up projections are tensors of their own.
"""

from __future__ import annotations

from typing import Any

from megatron.config import ModelConfig
from megatron.formats.huggingface.features import GATED, RMS_NORM, ROPE, Requirement
from megatron.formats.huggingface.parts import (
    EMBEDDING,
    FINAL,
    GATE_NAMES,
    attention_biased,
    llama_block,
    read_rms,
    read_shape,
    write_shape,
)
from megatron.formats.huggingface.rope import read_rope, write_rope
from megatron.formats.huggingface.settings import HFConfigReader
from megatron.formats.huggingface.table import Architecture


def divisible(model: ModelConfig) -> bool:
    """Whether the heads divide the hidden size, which its configuration class asks for."""
    return model.hidden_size % model.attention.num_attention_heads == 0


def _write(model: ModelConfig) -> dict[str, Any]:
    return {
        **write_shape(model),
        "head_dim": model.attention.kv_channels,
        "hidden_act": GATE_NAMES[model.mlp.activation],
        "attention_bias": model.attention.proj_bias,
        "mlp_bias": model.mlp.bias,
        **write_rope(model),
    }


def _read(given: HFConfigReader) -> dict[str, Any]:
    shape = read_shape(given, 4096, 11008, 32, 32, None, 2048)
    in_attention, in_mlp = given.flag("attention_bias", False), given.flag("mlp_bias", False)
    if in_mlp and not in_attention:
        given.refuse("mlp_bias", in_mlp, "attention_bias is False; here the MLP has biases only "
                     "where attention has them")  # fmt: skip
    # The order in which partial products are summed; what transformers does not read.
    given.unused("pretraining_tp", "max_sequence_length", "is_llama_config")
    return {
        **shape,
        **read_rms(given, 1e-6),
        **read_rope(given, shape["kv_channels"], shape["max_position_embeddings"], 10000.0),
        "add_bias_linear": in_mlp,
        "add_attention_bias": in_attention and not in_mlp,
    }


LLAMA = Architecture(
    title="Llama",
    model_type="llama",
    causal_lm="LlamaForCausalLM",
    entries=(
        *EMBEDDING,
        *llama_block(qkv_bias=attention_biased, proj_bias=attention_biased),
        *FINAL,
    ),
    requirements=(
        ROPE,
        RMS_NORM,
        GATED,
        Requirement(divisible, "--num-attention-heads that divide --hidden-size"),
    ),
    features=frozenset({"attention_bias", "grouped", "head_dim", "rope_scaling"}),
    write=_write,
    read=_read,
    vocab_size=32000,
    tied=False,
)
"""The table of Llama."""
