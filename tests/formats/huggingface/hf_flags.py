"""Flags of the plainest model of each architecture."""

from hf_classic_cases import CLASSIC_FLAGS
from hf_modern_cases import GEMMA2, MODERN_FLAGS, QWEN2

T5 = {
    "family": "t5", "encoder_decoder": True, "position_embedding_type": "relative",
    "normalization": "RMSNorm", "add_bias_linear": False, "query_pre_attn_scalar": 1.0,
    "relu": True, "scale_head_input": True,
}  # fmt: skip
T5_11 = T5 | {
    "relu": False, "glu_activation": "geglu", "scale_head_input": False,
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip
MEGATRON_BERT = {"family": "bert"}
BERT = MEGATRON_BERT | {"apply_residual_connection_post_layernorm": True}
ELECTRA = BERT | {"bert_binary_head": False}
ROBERTA = ELECTRA | {"position_embedding_offset": 2, "num_tokentypes": 1}
BART = {
    "family": "t5", "encoder_decoder": True, "position_embedding_offset": 2,
    "separate_decoder_embedding": True, "apply_residual_connection_post_layernorm": True,
}  # fmt: skip
MBART = {key: value for key, value in BART.items() if "post_layernorm" not in key} | {
    "embed_layernorm": True
}
MODERNBERT = {
    "llama": True, "family": "bert", "normalization": "UnbiasedLayerNorm", "swiglu": False,
    "glu_activation": "geglu_erf", "bert_binary_head": False, "first_norm": False,
    "embed_layernorm": True, "sliding_window": 9, "window_attn_skip_freq": "[0,1]",
    "rotary_base_local": 7.0,
}  # fmt: skip
MIXTRAL = {"llama": True, "num_experts": (4,)}
CORRECTED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
DEEPSEEK = MIXTRAL | CORRECTED | {
    "moe_ffn_hidden_size": 12, "moe_shared_expert_intermediate_size": 24,
}  # fmt: skip
LATENT_FLAGS = {
    "multi_latent_attention": True, "qk_layernorm": True, "latent_norm_epsilon": 1e-6,
    "kv_lora_rank": 8, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
MAMBA = {
    "mamba_num_heads": 8, "mamba_head_dim": 8, "mamba_state_dim": 8, "mamba_num_groups": 2,
}  # fmt: skip
QWEN3_5 = {
    "llama": True, "apply_layernorm_1p": True, "qk_layernorm": True, "attention_output_gate": True,
    "rotary_percent": 0.25, "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": "[1,0]", "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
QWEN3_NEXT = QWEN3_5 | {
    "num_experts": (4,), "moe_shared_expert_intermediate_size": 24, "moe_shared_expert_gate": True,
}  # fmt: skip
OLMOE = MIXTRAL | {"qk_layernorm": True, "qk_layernorm_whole": True}
NEOX = {"position_embedding_type": "rope", "parallel_residual": True}
BASES = {
    "gpt2": {}, "llama": {"llama": True}, "mistral": {"llama": True, "sliding_window": 9},
    "qwen2": {"llama": True, **QWEN2}, "qwen3": {"llama": True, "qk_layernorm": True},
    "phi3": {"llama": True, "rotary_percent": 0.75},
    "gemma2": {"llama": True, **GEMMA2, "sliding_window": 9},
    "gemma3_text": {"llama": True, **GEMMA2, "qk_layernorm": True, "sliding_window": 9,
                    "rotary_base_local": 7.0},
    "gpt_neox": NEOX, "opt": {"position_embedding_offset": 2},
    "falcon": NEOX | {"shared_parallel_norm": True},
    "bloom": {"position_embedding_type": "alibi", "embed_layernorm": True, "ffn_hidden_size": 128},
    "t5": T5, "bert": BERT, "megatron-bert": MEGATRON_BERT, "mt5": T5_11,
    "umt5": T5_11 | {"relative_attention_per_block": True}, "modernbert": MODERNBERT,
    "bart": BART, "mbart": MBART, "plbart": BART,
    "roberta": ROBERTA, "xlm-roberta": ROBERTA, "camembert": ROBERTA, "electra": ELECTRA,
    "distilbert": ELECTRA | {"num_tokentypes": 0, "norm_epsilon": 1e-12},
    "mixtral": MIXTRAL,
    "qwen2_moe": MIXTRAL | QWEN2 | {
        "moe_shared_expert_intermediate_size": 24, "moe_shared_expert_gate": True},
    "qwen3_moe": MIXTRAL | {"qk_layernorm": True}, "mellum": MIXTRAL | {"qk_layernorm": True},
    "olmoe": OLMOE, "flex_olmo": OLMOE | {"pre_norm": False, "post_norm": True},
    "granitemoe": MIXTRAL,
    "gpt_oss": MIXTRAL | {
        "add_bias_linear": True, "swiglu": False, "glu_activation": "quick_geglu",
        "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0, "moe_router_bias": True,
        "softmax_type": "learnable", "sliding_window": 9, "window_attn_skip_freq": 3},
    "glm4_moe": DEEPSEEK | {"rotary_percent": 0.75}, "dots1": DEEPSEEK | {"qk_layernorm": True},
    "solar_open": DEEPSEEK,
    "minimax_m2": OLMOE | CORRECTED | {"moe_router_normalize": True},
    "ernie4_5_moe": MIXTRAL | {
        "moe_router_pre_softmax": True, "moe_router_normalize": True,
        "moe_router_enable_expert_bias": True},
    "hunyuan_v1_moe": MIXTRAL | {
        "qk_layernorm": True, "qk_layernorm_after_rope": True, "ffn_hidden_size": 24,
        "moe_shared_expert_intermediate_size": 24},
    "phimoe": MIXTRAL | {"normalization": "LayerNorm", "moe_gate": "sparsemixer"},
    "deepseek_v3": DEEPSEEK | LATENT_FLAGS, "glm4_moe_lite": DEEPSEEK | LATENT_FLAGS,
    "deepseek_v2": MIXTRAL | LATENT_FLAGS | {
        "moe_router_pre_softmax": True, "moe_ffn_hidden_size": 12,
        "moe_shared_expert_intermediate_size": 24},
    "youtu": {"llama": True, **LATENT_FLAGS}, "minicpm3": {"llama": True, **LATENT_FLAGS},
    "llama4_text": MIXTRAL | {
        "moe_router_topk": 1, "moe_router_score_function": "sigmoid", "ffn_hidden_size": 24,
        "moe_router_normalize": False, "moe_apply_probs_on_input": True, "no_rope_freq": 1,
        "moe_shared_expert_intermediate_size": 24, "attention_chunk_size": 9, "qk_l2_norm": True,
        "window_attn_skip_freq": 3, "attention_temperature": 0.1},
    "bamba": MAMBA | {
        "llama": True, "experimental_attention_variant": "mamba2", "rotary_percent": 0.5,
        "linear_attention_freq": "[1,0]"},
    "nemotron_h": MAMBA | {
        "position_embedding_type": "none", "normalization": "RMSNorm", "add_bias_linear": False,
        "squared_relu": True, "num_layers": 3, "hybrid_layer_pattern": "M*-",
        "untie_embeddings_and_output_weights": True},
    "qwen3_next": QWEN3_NEXT, "qwen3_5_text": QWEN3_5, "qwen3_5_moe_text": QWEN3_NEXT,
} | CLASSIC_FLAGS | MODERN_FLAGS  # fmt: skip
"""By architecture."""
