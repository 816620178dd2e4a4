"""Small models for the planner's tests."""

import dataclasses
from collections.abc import Callable

import pytest
from configs import model_config, run_config

from megatron.config import ModelConfig

SHAPE = {
    "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 160, "num_attention_heads": 4,
    "num_query_groups": 4, "kv_channels": 16, "seq_length": 128, "max_position_embeddings": 128,
    "make_vocab_size_divisible_by": 8, "attention_dropout": 0.0, "hidden_dropout": 0.0,
}  # fmt: skip
LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}
BLOOM = {
    "position_embedding_type": "alibi", "embed_layernorm": True, "parallel_residual": True,
    "relu": True,
}  # fmt: skip
GEMMA2 = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "apply_layernorm_1p": True,
    "post_norm": True, "scale_embeddings": True, "glu_activation": "geglu", "num_query_groups": 2,
    "add_bias_linear": False, "sliding_window": 48, "window_attn_skip_freq": 2,
    "query_pre_attn_scalar": 24.0,
}  # fmt: skip
QWEN3 = LLAMA | {"qk_layernorm": True, "kv_channels": 24, "rotary_percent": 0.5}
NEOX = {
    "position_embedding_type": "rope", "rotary_percent": 0.25, "parallel_residual": True,
    "shared_parallel_norm": True, "qk_layernorm": True, "num_query_groups": 1,
}  # fmt: skip
BERT = {"family": "bert", "bert_binary_head": True}
T5 = {
    "family": "t5", "encoder_decoder": True, "decoder_num_layers": 2, "decoder_seq_length": 48,
}  # fmt: skip
RETRO = {
    "family": "retro", "retro_add_retriever": True, "retro_gpt_chunk_length": 16,
    "retro_cross_attention_layers": (2, 4), "retro_num_neighbors": 3,
    "retro_encoder_hidden_dropout": 0.0, "retro_encoder_attention_dropout": 0.0,
}  # fmt: skip
RELATIVE = {
    "position_embedding_type": "relative", "normalization": "RMSNorm", "add_bias_linear": False,
}  # fmt: skip
KINDS = {
    "bert": BERT,
    "bert post-norm": BERT | {"apply_residual_connection_post_layernorm": True},
    "bert lm only": {"family": "bert", "bert_binary_head": False, "relu": True},
    "retro": RETRO,
    "t5": T5,
    "t5 relative": T5 | RELATIVE | {"relu": True},
    "t5 untied": T5
    | RELATIVE
    | {
        "glu_activation": "geglu",
        "untie_embeddings_and_output_weights": True,
    },
    "umt5": T5 | RELATIVE | {"relative_attention_per_block": True},
    "bart": T5
    | {
        "position_embedding_offset": 2,
        "separate_decoder_embedding": True,
        "lm_head_bias": True,
        "apply_residual_connection_post_layernorm": True,
    },
    "modernbert": {
        **BERT,
        "bert_binary_head": False,
        "first_norm": False,
        "embed_layernorm": True,
        "glu_activation": "geglu_erf",
        "position_embedding_type": "rope",
        "sliding_window": 32,
        "window_attn_skip_freq": "[0,1,1,0]",
        "normalization": "UnbiasedLayerNorm",
    },
    "gpt2": {},
    "gpt2 untied": {"untie_embeddings_and_output_weights": True},
    "llama": LLAMA,
    "llama tied": LLAMA | {"untie_embeddings_and_output_weights": False},
    "one key head": {"num_query_groups": 1},
    "bias on qkv": LLAMA | {"add_qkv_bias": True, "num_query_groups": 1},
    "bias in attention": LLAMA | {"add_attention_bias": True, "num_query_groups": 1},
    "bias in the mlp": {"add_bias_linear": False, "add_mlp_bias": True},
    "no bias on qkv": {"add_bias_linear": False, "add_mlp_bias": True, "add_proj_bias": True},
    "bloom": BLOOM,
    "gemma2": GEMMA2,
    "gemma2 bounded": GEMMA2 | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 6.0},
    "gemma4": GEMMA2
    | {
        "apply_layernorm_1p": False,
        "qk_layernorm": True,
        "value_norm": True,
        "block_scalar": True,
        "global_kv_channels": 24,
        "global_num_query_groups": 1,
        "global_keys_as_values": True,
    },
    "qwen3": QWEN3,
    "neox": NEOX,
    "gpt-oss": LLAMA
    | {
        "swiglu": False,
        "quick_geglu": True,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 0.5,
        "softmax_type": "learnable",
    },
    "opt": {"position_embedding_offset": 2, "relu": True},
    "wide heads": {"kv_channels": 24, "max_position_embeddings": 200},
}


@pytest.fixture(scope="session")
def small() -> Callable[..., ModelConfig]:
    """Makes a complete small model of 61 tokens: its kind, the tensor size it is padded for, and
    values that are other than usual."""

    def make(kind: str = "gpt2", tensor: int = 1, **changes) -> ModelConfig:
        config = run_config(model=model_config(**SHAPE | KINDS[kind] | changes))
        parallel = dataclasses.replace(config.parallel, tensor_model_parallel_size=tensor)
        return dataclasses.replace(config, parallel=parallel).with_vocabulary(61).model

    return make
