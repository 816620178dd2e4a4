"""Llama 1, 2 and 3, and what differs from it little: Mistral, Qwen2 and Qwen3.

All have rotary positions, RMSNorm, a gated MLP and grouped-query attention. Query, key and value,
and gate and up projection, are separate tensors.
"""

from __future__ import annotations

from typing import Any

from megatron.config import ModelConfig
from megatron.formats.features import Requirement
from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.config_reader import HFConfigReader
from megatron.formats.huggingface.entries import attention_biased, llama_entries, norm, qkv_biased
from megatron.formats.huggingface.rope_and_windows import (
    FULL,
    SLIDING,
    layer_types,
    read_rope,
    read_windows,
    write_rope,
)

KEYS = {
    "max_position_embeddings": "max_position_embeddings",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "attention_dropout": "attention_dropout",
    "rms_norm_eps": "norm_epsilon",
    "initializer_range": "init_method_std",
}
"""Keys of Llama and of architectures that name their sizes like it."""
ACTIVATION = {"hidden_act": "activation"}
HEAD_DIM = {"head_dim": "kv_channels"}
FIXED = {"position_embedding_type": "rope", "normalization": "RMSNorm"}
NO_BIASES = {"add_bias_linear": False}
NO_ATTENTION_BIAS = "all linear layers must have biases, or none"

DIVISIBLE = Requirement(
    lambda m: m.hidden_size % m.attention.num_attention_heads == 0,
    "--num-attention-heads that divide --hidden-size",
)
"""Required by some configuration classes, although the width of a head is given."""
QK_NORMS = (
    *norm("attention.q_norm", "self_attn.q_norm"),
    *norm("attention.k_norm", "self_attn.k_norm"),
)


def _write_llama(model: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": model.attention.proj_bias,
        "mlp_bias": model.mlp.bias,
        **write_rope(model),
    }


def _read_llama(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    in_attention, in_mlp = given.flag("attention_bias"), given.flag("mlp_bias")
    if in_mlp and not in_attention:
        given.refuse("mlp_bias", in_mlp, "attention_bias is False; the MLP can have biases only "
                     "where attention has them")  # fmt: skip
    # The order in which partial sums are added; keys that transformers does not read.
    given.unused("pretraining_tp", "max_sequence_length", "is_llama_config")
    return {
        **read_rope(given, fields),
        "add_bias_linear": in_mlp,
        "add_attention_bias": in_attention and not in_mlp,
    }


LLAMA = Architecture(
    title="Llama",
    model_type="llama",
    model_class="LlamaForCausalLM",
    entries=llama_entries(qkv_bias=attention_biased, proj_bias=attention_biased),
    keys=KEYS | HEAD_DIM | ACTIVATION,
    fixed=FIXED,
    features=frozenset({"add_attention_bias", "rope_scaling"}),
    gated=True,
    requirements=(DIVISIBLE,),
    write=_write_llama,
    read=_read_llama,
)


def _read_mistral(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    kinds = [SLIDING] * fields["num_layers"]
    given.only("layer_types", (kinds,), f"all blocks of such models have {SLIDING}")
    return read_rope(given, fields)


MISTRAL = Architecture(
    title="Mistral",
    model_type="mistral",
    model_class="MistralForCausalLM",
    entries=llama_entries(),
    keys=KEYS | HEAD_DIM | ACTIVATION | {"sliding_window": "sliding_window"},
    fixed=FIXED | NO_BIASES,
    features=frozenset({"rope_scaling"}),
    gated=True,
    write=write_rope,
    read=_read_mistral,
)
"""Llama without biases, with a sliding window in all blocks or in none."""


def _write_qwen(model: ModelConfig) -> dict[str, Any]:
    kinds = layer_types(model)
    return {
        "use_sliding_window": SLIDING in kinds,
        "sliding_window": model.attention.sliding_window,
        # Where layer_types is not read: the first block with a window, all later ones have it too.
        "max_window_layers": kinds.index(SLIDING) if SLIDING in kinds else model.num_layers,
        "layer_types": kinds,
        **write_rope(model),
    }


def _read_qwen(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    used, window = given.flag("use_sliding_window"), given.optional_whole("sliding_window")
    bound = given.content.get("max_window_layers", 28)
    given.unused("max_window_layers")
    if not isinstance(bound, int):
        given.refuse("max_window_layers", bound, "expected an integer")
    default = [
        SLIDING if used and window is not None and n >= bound else FULL
        for n in range(fields["num_layers"])
    ]
    return {
        **read_rope(given, fields),
        **read_windows(given, window if used else None, default),
    }


QWEN2 = Architecture(
    title="Qwen2",
    model_type="qwen2",
    model_class="Qwen2ForCausalLM",
    entries=llama_entries(qkv_bias=qkv_biased),
    keys=KEYS | ACTIVATION,
    only_read=HEAD_DIM,
    fixed=FIXED | NO_BIASES | {"add_qkv_bias": True},
    features=frozenset({"rope_scaling", "sliding_window", "window_attn_skip_freq"}),
    gated=True,
    write=_write_qwen,
    read=_read_qwen,
)
"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values alone."""


def _write_qwen3(model: ModelConfig) -> dict[str, Any]:
    return {**_write_qwen(model), "attention_bias": False}


def _read_qwen3(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    given.only("attention_bias", (False,), NO_ATTENTION_BIAS)
    return _read_qwen(given, fields)


QWEN3 = Architecture(
    title="Qwen3",
    model_type="qwen3",
    model_class="Qwen3ForCausalLM",
    entries=llama_entries(QK_NORMS),
    keys=KEYS | ACTIVATION | HEAD_DIM,
    fixed=FIXED | NO_BIASES | {"qk_layernorm": True},
    features=QWEN2.features,
    gated=True,
    write=_write_qwen3,
    read=_read_qwen3,
)
"""Llama without biases that normalises each head's queries and keys."""
