"""Small models of the architectures with Mamba-2 or Gated DeltaNet, as those of :mod:`hf_cases`."""

from typing import Any

_SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 40,
}  # fmt: skip
_BAMBA = _SIZES | {
    "num_hidden_layers": 3, "mamba_n_heads": 8, "mamba_d_state": 8, "mamba_n_groups": 2,
    "attn_layer_indices": [1],
}  # fmt: skip
_LINEAR = {"rope_parameters": {
    "rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0, "partial_rotary_factor": 0.5,
}}  # fmt: skip
_DENSE = _SIZES | {
    "layers_block_type": ["linear_attention", "mlp", "full_attention"], "head_dim": 12,
    "ssm_state_size": 8, "mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 2,
}  # fmt: skip
_SPARSE = _DENSE | {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    "n_routed_experts": 6, "moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 24,
    "num_experts_per_tok": 2,
}  # fmt: skip

NEMOTRON_EXPERTS: dict[str, dict[str, Any]] = {
    "plain": _SPARSE,
    "latent": _SPARSE | {
        "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 2.5, "moe_latent_size": 16,
    },
    "unnormalised": _SPARSE | {"norm_topk_prob": False, "num_key_value_heads": 4},
}  # fmt: skip
"""Cases of Nemotron-H with experts."""
_DELTA = _SIZES | {
    "num_hidden_layers": 3, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
_NEXT = _DELTA | {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 24,
}  # fmt: skip
_WHOLE_ROPE = {"rope_parameters": {
    "rope_type": "linear", "rope_theta": 5e4, "factor": 4.0, "partial_rotary_factor": 0.5,
}}  # fmt: skip

HYBRID_CASES: dict[str, dict[str, dict[str, Any]]] = {
    "bamba": {
        "plain": _BAMBA,
        "biases": _BAMBA | {"mamba_proj_bias": True, "attention_bias": True, "mlp_bias": True},
        "mlp_biases": _BAMBA | {"mlp_bias": True},
        "one_group": _BAMBA | {"mamba_n_groups": 1, "mamba_conv_bias": False, "mamba_d_conv": 3},
        "limits": _BAMBA | {"time_step_limit": [0.5, 1.0], "mamba_expand": 3, "mamba_n_heads": 6},
        "tied": _BAMBA | {"attn_layer_indices": [0, 2], "tie_word_embeddings": True} | _LINEAR,
    },
    "nemotron_h": NEMOTRON_EXPERTS | {
        "dense": _DENSE | {"use_bias": True, "use_conv_bias": False, "time_step_min": 0.7},
        "gelu": _DENSE | {"layers_block_type": ["mlp", "mamba", "attention"], "n_groups": 1,
                          "conv_kernel": 3, "mlp_hidden_act": "gelu", "mlp_bias": True},
    },
    "qwen3_next": {
        "plain": _NEXT,
        "dense_layer": _NEXT | {"mlp_only_layers": [1], "attention_bias": True,
                                "linear_num_value_heads": 2, "linear_conv_kernel_dim": 2},
        "tied": _NEXT | {"norm_topk_prob": False, "tie_word_embeddings": True} | _WHOLE_ROPE,
    },
    "qwen3_5_text": {
        "plain": _DELTA,
        "tied": _DELTA | {"tie_word_embeddings": True, "linear_num_key_heads": 1} | _WHOLE_ROPE,
    },
    "qwen3_5_moe_text": {
        "plain": {key: value for key, value in _NEXT.items() if key != "intermediate_size"},
    },
}  # fmt: skip
"""Cases by architecture and name; the first is the default one's."""
