"""Further small models of the architectures with experts, as those of :mod:`hf_cases`."""

from typing import Any

from hf_hybrid_cases import NEMOTRON_EXPERTS

_SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 40,
    "num_experts_per_tok": 2,
}  # fmt: skip
_LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}
_TIED = {"tie_word_embeddings": True, "num_key_value_heads": 4}
_NO_SCALING = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
_GPT_OSS = _SIZES | {
    "num_local_experts": 6, "head_dim": 12, "sliding_window": 7, "swiglu_limit": 0.4,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "beta_fast": 4.0,
        "beta_slow": 0.7, "truncate": False, "original_max_position_embeddings": 10,
    },
}  # fmt: skip
_DEEPSEEK = _SIZES | {
    "n_routed_experts": 8, "moe_intermediate_size": 20, "head_dim": 12, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
_SOLAR = {key: value for key, value in _DEEPSEEK.items()
          if key not in ("first_k_dense_replace", "intermediate_size")}  # fmt: skip
_GLM = _DEEPSEEK | {"num_mtp_layers": 0, "use_qk_norm": True, "attention_bias": True}
_GROUPS = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
_SCALED = {"routed_scaling_factor": 2.5, "norm_topk_prob": True}
_MINIMAX = _SIZES | {"num_local_experts": 6, "head_dim": 8, "rotary_dim": 4}
_ERNIE = {
    **{key: value for key, value in _SIZES.items() if key != "num_experts_per_tok"},
    "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 20, "moe_num_shared_experts": 2,
}  # fmt: skip
_HUNYUAN = {
    **{key: value for key, value in _SIZES.items() if key != "num_experts_per_tok"},
    "num_experts": 6, "moe_topk": 2, "head_dim": 12,
}  # fmt: skip
_PHI = _SIZES | {
    "num_local_experts": 6, "attention_bias": True, "lm_head_bias": True, **_NO_SCALING,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.5], "short_mscale": 1.1, "long_mscale": 1.3,
    "original_max_position_embeddings": 16,
}  # fmt: skip

_LLAMA4 = _SIZES | {
    "num_experts_per_tok": 1, "num_local_experts": 4, "intermediate_size": 20, "head_dim": 12,
    "intermediate_size_mlp": 48, "num_hidden_layers": 4, "attention_chunk_size": 7,
    "moe_layers": [1, 3], "no_rope_layers": [1, 0, 1, 1],
}  # fmt: skip
_TUNED = {"floor_scale": 5, "attn_scale": 0.5}

LLAMA4_CASES: dict[str, dict[str, dict[str, Any]]] = {
    "llama4_text": {
        "plain": _LLAMA4 | _TUNED,
        "scout": _LLAMA4 | _TUNED | {
            "no_rope_layers": None, "moe_layers": None, "rope_parameters": {"rope_type": "llama3",
            "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16}},
        "maverick": _LLAMA4 | {
            "use_qk_norm": False, "moe_layers": None, "interleave_moe_layer_step": 2,
            "num_key_value_heads": 1},
        "biases": _LLAMA4 | {"attention_bias": True, "attn_temperature_tuning": False},
        "kinds": _LLAMA4 | _TUNED | {"layer_types": [
            "full_attention", "chunked_attention", "chunked_attention", "full_attention"]},
        "rotated": _LLAMA4 | {"no_rope_layers": [1] * 4, "num_key_value_heads": 4,
                              "attn_temperature_tuning": False},
        "tied": _LLAMA4 | _TIED,
    },
}  # fmt: skip
"""The text model of Llama 4, whose experts are not told which tokens chose them."""

MORE_CASES: dict[str, dict[str, dict[str, Any]]] = {
    "gpt_oss": {
        "plain": _GPT_OSS,
        "even": _GPT_OSS | {"num_hidden_layers": 4, "num_key_value_heads": 1} | _NO_SCALING,
        "tied": _GPT_OSS | _TIED | {"num_experts_per_tok": 3},
        "no_window": _GPT_OSS | {"layer_types": ["full_attention"] * 3},
        "all_windows": _GPT_OSS | {"layer_types": ["sliding_attention"] * 3, "swiglu_limit": 7.0},
    },
    "glm4_moe": {
        "groups": _GLM | _GROUPS | _SCALED,
        "plain": _GLM | {"use_qk_norm": False, "attention_bias": False},
        "unnormalised": _GLM | {"norm_topk_prob": False, "n_shared_experts": 2},
        "no_dense": _GLM | {"first_k_dense_replace": 0},
        "two_dense": _GLM | _GROUPS | {"first_k_dense_replace": 2, "routed_scaling_factor": 0.7},
        "rotated_whole": _GLM | {"rope_parameters": {
            "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}},
        "tied": _GLM | _TIED,
        "one_choice": _GLM | {"num_experts_per_tok": 1, "norm_topk_prob": False},
        "one_normalised": _GLM | {"num_experts_per_tok": 1},
    },
    "dots1": {
        "groups": _DEEPSEEK | _GROUPS | _SCALED,
        "plain": _DEEPSEEK,
        "biases": _DEEPSEEK | {"attention_bias": True, "n_shared_experts": 2},
        "window": _DEEPSEEK | {"sliding_window": 7, "max_window_layers": 0} | _LINEAR,
        "pattern": _DEEPSEEK | {"sliding_window": 7, "layer_types": [
            "sliding_attention", "full_attention", "sliding_attention"]},
        "tied": _DEEPSEEK | _TIED | {"first_k_dense_replace": 0},
    },
    "solar_open": {
        "groups": _SOLAR | _GROUPS | _SCALED,
        "plain": _SOLAR,
        "biases": _SOLAR | {"attention_bias": True, "n_shared_experts": 2},
        "tied": _SOLAR | _TIED | _LINEAR | {"norm_topk_prob": False},
    },
    "minimax_m2": {
        "plain": _MINIMAX,
        "rotated_whole": _SIZES | {"num_local_experts": 6, "head_dim": 12, "rope_parameters": {
            "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}},
        "tied": _MINIMAX | _TIED | {"num_experts_per_tok": 1},
    },
    "ernie4_5_moe": {
        "plain": _ERNIE,
        "untied": _ERNIE | {"tie_word_embeddings": False, "num_key_value_heads": 1},
        "not_shared": _ERNIE | {"moe_num_shared_experts": 0, "moe_layer_start_index": 0},
        "interval": _ERNIE | {"moe_layer_interval": 2, "num_hidden_layers": 5},
        "end": _ERNIE | {"moe_layer_end_index": 1, "head_dim": 12} | _LINEAR,
    },
    "hunyuan_v1_moe": {
        "plain": _HUNYUAN,
        "biases": _HUNYUAN | {"attention_bias": True, "num_key_value_heads": 1},
        "tied": _HUNYUAN | _TIED,
    },
    "nemotron_h": NEMOTRON_EXPERTS,
    "phimoe": {
        "plain": _PHI,
        "no_biases": _PHI | {"attention_bias": False, "lm_head_bias": False},
        "tied": _PHI | _TIED,
        "window": _PHI | {"sliding_window": 7},
    },
}  # fmt: skip
"""Cases by architecture and name; the first is the default one's."""
