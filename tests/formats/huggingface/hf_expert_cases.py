"""Small models of the architectures with experts, as those of :mod:`hf_cases`."""

from typing import Any

_SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 40,
    "attention_dropout": 0.0, "num_experts_per_tok": 2,
}  # fmt: skip
_LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}
_LOCAL = _SIZES | {"num_local_experts": 6}
_MANY = _SIZES | {"num_experts": 6}
_QWEN2 = _MANY | {
    "num_hidden_layers": 3, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28,
    "use_sliding_window": False,
}  # fmt: skip
_QWEN3 = _MANY | {"num_hidden_layers": 3, "moe_intermediate_size": 20, "head_dim": 12}
_BASE = {"rope_type": "default", "rope_theta": 50.0}
_MELLUM = _QWEN3 | {
    "sliding_window": 7, "norm_topk_prob": True,
    "rope_parameters": {"full_attention": _BASE, "sliding_attention": _BASE},
}  # fmt: skip
_MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_SUMMING = {"norm_topk_prob": True}
_TIED = {"tie_word_embeddings": True, "num_key_value_heads": 4}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0, "logits_scaling": 2.5, "residual_multiplier": 0.22,
    "attention_multiplier": 0.4,
}  # fmt: skip

EXPERT_CASES: dict[str, dict[str, dict[str, Any]]] = {
    "mixtral": {
        "plain": _LOCAL,
        "tied": _LOCAL | _TIED,
        "window": _LOCAL | {"sliding_window": 7, "router_jitter_noise": 0.01},
        "all_chosen": _LOCAL | {"num_experts_per_tok": 6, "router_aux_loss_coef": 0.02},
        "head_dim": _LOCAL | {"head_dim": 12, "hidden_act": "gelu_pytorch_tanh"} | _LINEAR,
    },
    "qwen2_moe": {
        "plain": _QWEN2,
        "summing": _QWEN2 | _SUMMING,
        "dense_first": _QWEN2 | {"mlp_only_layers": [0]},
        "every_second": _QWEN2 | {"decoder_sparse_step": 2, "num_hidden_layers": 4},
        "tied": _QWEN2 | _TIED | {"qkv_bias": False},
        "window": _QWEN2 | {"use_sliding_window": True, "sliding_window": 7,
                            "layer_types": ["sliding_attention"] * 3},
        "one_choice": _QWEN2 | {"num_experts_per_tok": 1},
    },
    "qwen3_moe": {
        "plain": _QWEN3 | _SUMMING,
        "unnormalised": _QWEN3,
        "dense_middle": _QWEN3 | _SUMMING | {"mlp_only_layers": [1]},
        "every_third": _QWEN3 | {"decoder_sparse_step": 3},
        "biases": _QWEN3 | {"attention_bias": True},
        "tied": _QWEN3 | _TIED,
        "window": _QWEN3 | {"use_sliding_window": True, "sliding_window": 7},
        "one_choice": _QWEN3 | {"num_experts_per_tok": 1},
    },
    "mellum": {
        "plain": _MELLUM,
        "dense": _MELLUM | _MIXED | {"mlp_layer_types": ["sparse", "dense", "sparse"]},
        "unnormalised": _MELLUM | {"norm_topk_prob": False, "attention_bias": True},
        "default_bases": _MELLUM | _MIXED | {"rope_parameters": None},
        "tied": _MELLUM | _TIED | {"layer_types": ["sliding_attention"] * 3},
        "scaled": _MELLUM | _MIXED | {"rope_parameters": {
            "full_attention": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 2.5,
                               "original_max_position_embeddings": 16},
            "sliding_attention": _BASE}},
    },
    "olmoe": {
        "plain": _MANY,
        "clip": _MANY | {"clip_qkv": 0.6} | _SUMMING,
        "biases": _MANY | {"attention_bias": True},
        "tied": _MANY | _TIED,
    },
    "flex_olmo": {
        "plain": _MANY,
        "summing": _MANY | _SUMMING | {"attention_bias": True},
        "tied": _MANY | _TIED,
    },
    "granitemoe": {
        "plain": _LOCAL | _MULTIPLIERS,
        "no_multipliers": _LOCAL,
        "biases": _LOCAL | {"attention_bias": True},
        "tied": _LOCAL | _TIED | _MULTIPLIERS,
    },
}  # fmt: skip
"""Cases by architecture and name; the first is the default one's."""
