"""Llama: rotary positions, RMSNorm, SwiGLU, grouped-query attention, biases everywhere or nowhere.

Its query, key and value, and its gate and up projections are tensors of their own.
"""

from __future__ import annotations

from typing import Any

from megatron.checkpoint.huggingface.table import Architecture, Entry, Requirement
from megatron.config import ModelConfig


def _qkv_rows(model: ModelConfig) -> tuple[int, int, int]:
    assert model.num_attention_heads and model.num_query_groups and model.kv_channels
    queries = model.num_attention_heads * model.kv_channels
    keys = model.num_query_groups * model.kv_channels
    return queries, keys, keys


def _gate_up_rows(model: ModelConfig) -> tuple[int, int]:
    assert model.ffn_hidden_size
    return model.ffn_hidden_size, model.ffn_hidden_size


def _biased(model: ModelConfig) -> bool:
    return model.add_bias_linear


def _untied(model: ModelConfig) -> bool:
    return not model.tied


def _divisible(model: ModelConfig) -> bool:
    assert model.hidden_size and model.num_attention_heads
    return model.hidden_size % model.num_attention_heads == 0


def _config(model: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.unpadded_vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "hidden_act": "silu",
        "attention_bias": model.add_bias_linear,
        "mlp_bias": model.add_bias_linear,
        "attention_dropout": model.attention_dropout,
        "rms_norm_eps": model.norm_epsilon,
        "initializer_range": model.init_method_std,
        # transformers 4 reads the first, 5 the second.
        "rope_theta": model.rotary_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
        "tie_word_embeddings": model.tied,
    }


# fmt: off
LLAMA = Architecture(
    title="Llama",
    entries=(
        Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
        Entry("layers.{n}.attention_norm.weight", ("model.layers.{n}.input_layernorm.weight",)),
        Entry("layers.{n}.attention.qkv.weight",
              ("model.layers.{n}.self_attn.q_proj.weight",
               "model.layers.{n}.self_attn.k_proj.weight",
               "model.layers.{n}.self_attn.v_proj.weight"), rows=_qkv_rows),
        Entry("layers.{n}.attention.qkv.bias",
              ("model.layers.{n}.self_attn.q_proj.bias",
               "model.layers.{n}.self_attn.k_proj.bias",
               "model.layers.{n}.self_attn.v_proj.bias"), rows=_qkv_rows, when=_biased),
        Entry("layers.{n}.attention.proj.weight", ("model.layers.{n}.self_attn.o_proj.weight",)),
        Entry("layers.{n}.attention.proj.bias", ("model.layers.{n}.self_attn.o_proj.bias",),
              when=_biased),
        Entry("layers.{n}.mlp_norm.weight", ("model.layers.{n}.post_attention_layernorm.weight",)),
        Entry("layers.{n}.mlp.up.weight",
              ("model.layers.{n}.mlp.gate_proj.weight",
               "model.layers.{n}.mlp.up_proj.weight"), rows=_gate_up_rows),
        Entry("layers.{n}.mlp.up.bias",
              ("model.layers.{n}.mlp.gate_proj.bias",
               "model.layers.{n}.mlp.up_proj.bias"), rows=_gate_up_rows, when=_biased),
        Entry("layers.{n}.mlp.down.weight", ("model.layers.{n}.mlp.down_proj.weight",)),
        Entry("layers.{n}.mlp.down.bias", ("model.layers.{n}.mlp.down_proj.bias",), when=_biased),
        Entry("final_norm.norm.weight", ("model.norm.weight",)),
        Entry("output_layer.weight", ("lm_head.weight",), when=_untied),
    ),
    requirements=(
        Requirement(lambda m: m.position_embedding_type == "rope",
                    "--position-embedding-type rope"),
        Requirement(lambda m: m.rotary_percent == 1.0, "--rotary-percent 1.0"),
        Requirement(lambda m: m.normalization == "RMSNorm", "--normalization RMSNorm"),
        Requirement(lambda m: m.swiglu, "--swiglu"),
        Requirement(lambda m: m.add_bias_linear or not m.add_qkv_bias,
                    "no --add-qkv-bias (it has biases on all linear layers or on none; on query, "
                    "key and value alone they are Qwen2's, for which there is no table)"),
        Requirement(_divisible, "--num-attention-heads that divide --hidden-size"),
    ),
    config=_config,
)
# fmt: on
"""The table of Llama."""
