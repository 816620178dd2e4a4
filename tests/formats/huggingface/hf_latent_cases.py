"""Small models of the architectures with latent attention, as those of :mod:`hf_cases`."""

from typing import Any

_SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 40,
    "attention_dropout": 0.0, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "tie_word_embeddings": False,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 2.5, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 0.8, "mscale_all_dim": 0.7, "original_max_position_embeddings": 16,
}  # fmt: skip
_EXPERTS = {
    "moe_intermediate_size": 20, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip
_V2 = _SIZES | _EXPERTS | {"routed_scaling_factor": 1.0}
_V3 = _SIZES | _EXPERTS | {"n_group": 1, "topk_group": 1, "num_mtp_layers": 0}
_DIRECT = {"q_lora_rank": None}
_SCALED = {"rope_parameters": _YARN}
_BIASED = {"attention_bias": True}
_LITE = _SIZES | _EXPERTS | {"n_group": 1, "topk_group": 1}
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.5], "original_max_position_embeddings": 16,
}  # fmt: skip
del _LITE["first_k_dense_replace"]

LATENT_CASES: dict[str, dict[str, dict[str, Any]]] = {
    "deepseek_v3": {
        "plain": _V3 | _SCALED,
        "groups": _V3
        | {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "n_shared_experts": 1},
        "moonlight": _V3 | _DIRECT | {"routed_scaling_factor": 2.446, "num_experts_per_tok": 3},
        "halves": _V3 | {"rope_interleave": False},
        "biases": _V3 | _BIASED | {"norm_topk_prob": False},
        "values_wider": _V3 | {"v_head_dim": 22, "tie_word_embeddings": True},
        "epsilon": _V3 | {"rms_norm_eps": 1e-2, "first_k_dense_replace": 0},
    },
    "deepseek_v2": {
        "plain": _V2 | _DIRECT | _SCALED,
        "groups": _V2
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
        | {"num_experts_per_tok": 4, "routed_scaling_factor": 16.0},
        "biases": _V2 | _BIASED | {"n_shared_experts": 1, "rms_norm_eps": 1e-2},
        "values_wider": _V2 | {"v_head_dim": 22, "tie_word_embeddings": True},
    },
    "glm4_moe_lite": {
        "plain": _LITE | {"rms_norm_eps": 1e-5, "v_head_dim": 18},
        "dense_middle": _LITE | {"mlp_layer_types": ["sparse", "dense", "sparse"]} | _SCALED,
        "odd_heads": _LITE | {"num_attention_heads": 5, "num_key_value_heads": 5} | _DIRECT,
    },
    "youtu": {
        "plain": _SIZES | {"tie_word_embeddings": True},
        "untied": _SIZES | _SCALED | _BIASED,
        "halves": _SIZES | _DIRECT | {"rope_interleave": False},
    },
    "minicpm3": {
        "plain": _SIZES | {"dim_model_base": 8, "rms_norm_eps": 1e-5},
        "no_factors": _SIZES | {"scale_emb": 1, "scale_depth": None, "dim_model_base": None},
        "longrope": _SIZES | _DIRECT | {"rope_parameters": _LONGROPE, "v_head_dim": 8},
    },
}  # fmt: skip
"""Cases by architecture and name; the first is the default one's."""
