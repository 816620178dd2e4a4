"""Small models of the dense decoders of today, as those of :mod:`hf_cases`."""

from typing import Any

Case = dict[str, Any]

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 40,
    "attention_dropout": 0.0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 2.5,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
PLAIN = {"rope_type": "default", "rope_theta": 100.0}
ROPES = {"default": PLAIN, "linear": LINEAR, "dynamic": DYNAMIC, "llama3": LLAMA3, "yarn": YARN}


def longrope(pairs: int) -> Case:
    return {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16,
        "short_factor": [1.0 + 0.1 * n for n in range(pairs)],
        "long_factor": [1.0 + 0.9 * n for n in range(pairs)],
    }  # fmt: skip


_WINDOWS = SIZES | {"num_hidden_layers": 5, "sliding_window": 7}
_FACTORS = {
    "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22,
    "attention_multiplier": 0.21,
}  # fmt: skip
_NO_DROPOUT = {key: value for key, value in SIZES.items() if key != "attention_dropout"}
_MIXED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention",
          "full_attention"]  # fmt: skip
_BOTH = {"full_attention": PLAIN, "sliding_attention": PLAIN}
_GRANITE4 = {("shared_" if key == "intermediate_size" else "") + key: value
             for key, value in SIZES.items()} | _FACTORS | {
    "layer_types": ["full_attention"] * 2, "num_local_experts": 0, "mamba_n_heads": 1,
    "position_embedding_type": "rope",
}  # fmt: skip
_GEMMA = SIZES | {"head_dim": 12}
_YARN3 = YARN | {"llama_4_scaling_beta": 0.4, "mscale": 1.0, "mscale_all_dim": 1.0}

_GEMMA4 = SIZES | {
    "head_dim": 8, "global_head_dim": 12, "num_hidden_layers": 5, "sliding_window": 7,
    "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
}  # fmt: skip

MODERN: dict[str, Case] = {
    "ministral": _WINDOWS | {"head_dim": 12, "layer_types": [
        "full_attention", "sliding_attention", "sliding_attention", "full_attention",
        "sliding_attention"]},
    "ministral3": SIZES | {"head_dim": 12, "rope_parameters": _YARN3},
    "bitnet": SIZES,
    "cwm": _WINDOWS | {"head_dim": 12, "bos_token_id": 0, "eos_token_id": 1},
    "seed_oss": SIZES | {"head_dim": 12, "residual_dropout": 0.0},
    "hunyuan_v1_dense": SIZES | {"head_dim": 12},
    "ernie4_5": _NO_DROPOUT | {"head_dim": 12},
    "helium": SIZES | {"head_dim": 8},
    "smollm3": SIZES | {"num_hidden_layers": 4},
    "olmo": SIZES | {"clip_qkv": 0.6},
    "olmo2": SIZES,
    "olmo3": _WINDOWS,
    "exaone4": _WINDOWS,
    "granite": SIZES | _FACTORS,
    "granitemoehybrid": _GRANITE4,
    "granite_swa": _WINDOWS | _FACTORS,
    "hyperclovax": SIZES | _FACTORS,
    "glm": SIZES | {"head_dim": 12, "eos_token_id": 2},
    "glm4": SIZES | {"head_dim": 12, "eos_token_id": 2},
    "cohere": SIZES | {"logit_scale": 0.3},
    "cohere2": _WINDOWS,
    "cohere_compass_text": _WINDOWS | {"logit_scale": 0.3, "layer_types": _MIXED,
                                       "rope_parameters": _BOTH},
    "gemma": _GEMMA,
    "gemma4_text": _GEMMA4,
    "vaultgemma": _GEMMA | {"num_hidden_layers": 3, "query_pre_attn_scalar": 12,
                            "sliding_window": 7, "attn_logit_softcapping": 2.0},
    "arcee": SIZES,
    "jais2": SIZES,
    "nemotron": SIZES | {"head_dim": 12},
    "apertus": SIZES,
    "nanochat": SIZES,
    "internlm3": SIZES | {"head_dim": 12},
    "iquestcoder": SIZES | {"head_dim": 12},
}  # fmt: skip
"""The model of each architecture that is compared by default."""

NEVER_WIDE = ("bitnet", "cohere2", "cohere_compass_text", "helium")
"""Architectures whose heads have hidden size / heads channels."""
DIVIDING = ("cwm", "arcee", "jais2", "internlm3", "iquestcoder", "hyperclovax", "vaultgemma")
"""Architectures whose configuration wants heads that divide the hidden size all the same."""
WHOLE = {"attention_bias": True, "mlp_bias": True}
BIASED: dict[str, list[Case]] = {
    **dict.fromkeys(
        ("smollm3", "granite", "granite_swa", "hyperclovax", "arcee", "jais2", "nemotron",
         "iquestcoder"),
        [WHOLE, WHOLE | {"attention_bias": False}, WHOLE | {"mlp_bias": False},
         {"attention_bias": False, "mlp_bias": False}]),
    **dict.fromkeys(
        ("bitnet", "hunyuan_v1_dense", "olmo", "olmo2", "olmo3", "cohere", "cohere2",
         "cohere_compass_text", "gemma", "granitemoehybrid", "apertus", "nanochat", "glm", "glm4"),
        [{"attention_bias": True}, {"attention_bias": False}]),
    "helium": [WHOLE, {"mlp_bias": True}, {"attention_bias": True}],
    "cwm": [{"mlp_bias": True}],
    "internlm3": [WHOLE],
    "ernie4_5": [{"use_bias": True}],
    "seed_oss": [WHOLE | {"attention_out_bias": True}, WHOLE, {"attention_out_bias": True},
                 {"attention_bias": False}, {"attention_bias": False, "mlp_bias": True}],
}  # fmt: skip
"""Values of the keys for biases."""
PARTIAL = ("glm", "glm4", "nemotron")
"""Architectures that rotate a part of each head."""
WINDOWED = (
    "ministral",
    "cwm",
    "olmo3",
    "exaone4",
    "cohere2",
    "smollm3",
    "vaultgemma",
    "granite_swa",
)
OTHERS: dict[str, dict[str, Case]] = {
    "smollm3": {"no_rope": {"no_rope_layers": [0, 1, 1, 0]}, "rope": {"no_rope_layers": [1] * 4},
                "windows": {"use_sliding_window": True, "sliding_window": 7}},
    "olmo": {"no_clip": {"clip_qkv": None}},
    "olmo3": {"local": {"rope_parameters": {"full_attention": PLAIN,
                                            "sliding_attention": PLAIN | {"rope_theta": 5.0}}}},
    "exaone4": {"no_window": {"sliding_window": None, "layer_types": ["full_attention"] * 5}},
    "granite": {"none": {f"{name}_multiplier": 1.0 for name in ("embedding", "residual")}
                | {"logits_scaling": 1.0}},
    "granite_swa": {"no_rope": {"rope_parameters": PLAIN,
                                "layer_rope_theta": [0, 50.0, 0, 50.0, 100.0]},
                    "local_alone": {"layer_rope_theta": [0, 50.0, 50.0, 50.0, 0]}},
    "hyperclovax": {"pre_norm": {"use_post_norm": False},
                    "derived": {"attention_multiplier": None}},
    "cohere": {"qk_norm": {"use_qk_norm": True},
               "qk_norm,odd": {"use_qk_norm": True, "num_attention_heads": 3, "hidden_size": 36,
                               "num_key_value_heads": 1, "logit_scale": 1.0}},
    "cohere_compass_text": {
        "full_alone": {"rope_parameters": _BOTH | {"sliding_attention": None}},
        "sliding_alone": {"rope_parameters": {"full_attention": None, "sliding_attention": YARN}},
        "local": {"rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}},
        "no_scale": {"logit_scale": None}},
    "gemma4_text": {
        "own_values": {"attention_k_eq_v": False},
        "own_values,odd": {"attention_k_eq_v": False, "hidden_size": 36, "head_dim": 10,
                           "num_attention_heads": 3, "num_key_value_heads": 1},
        "cap": {"final_logit_softcapping": 1.5, "global_head_dim": 8,
                "num_global_key_value_heads": None},
        "whole": {"layer_types": ["full_attention"] * 5},
        "eleven": {"num_hidden_layers": 11,
                   "layer_types": [*["sliding_attention", "full_attention"] * 5, "full_attention"]},
        "biases": {"attention_bias": True},
        "linear": {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": PLAIN}},
        "proportional": {"rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 50.0,
                               "partial_rotary_factor": 0.5},
            "sliding_attention": PLAIN}},
    },
    "vaultgemma": {"no_caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None}},
    "nanochat": {"no_cap": {"final_logit_softcapping": None}},
    "hunyuan_v1_dense": {"alpha": {"rope_parameters": DYNAMIC | {"alpha": 30.0}}},
    "ministral3": {"window": {"sliding_window": 7},
                   "beta": {"rope_parameters": _YARN3 | {"llama_4_scaling_beta": 0.0}}},
    "arcee": {"gelu": {"hidden_act": "gelu"}},
    "apertus": {"relu2": {"hidden_act": "relu2"}},
    "gemma": {"silu": {"hidden_act": "silu"}},
}  # fmt: skip
"""Further flags of an architecture."""


def _roped(model_type: str, settings: Case, rope: Case) -> Case:
    if model_type in ("olmo3", "gemma4_text"):
        base = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        rope = {"full_attention": rope, "sliding_attention": base}
    elif model_type == "cohere_compass_text":
        rope = {"full_attention": rope, "sliding_attention": rope}
    elif model_type == "ministral3":
        rope = {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.4} | rope
    return settings | {"rope_parameters": rope}


def shapes(model_type: str) -> dict[str, Case]:
    """Shapes of an architecture that its tests have besides the first: heads, biases, RoPE."""
    plain, wide = MODERN[model_type], model_type not in NEVER_WIDE
    width = plain.get("global_head_dim", plain.get("head_dim", 8))
    odd = {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1}
    changes: dict[str, Case] = {
        "odd_heads": odd | {"num_key_value_heads": 3, "head_dim": 12},
        "one_group": odd | {"head_dim": 12},
        "odd_groups": {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 3,
                       "head_dim": 8 if model_type in PARTIAL else 6},
        "tied": {"tie_word_embeddings": True}, "untied": {"tie_word_embeddings": False},
    }  # fmt: skip
    for each in changes.values():
        if model_type in ("cohere2", "cohere_compass_text", "bitnet"):
            each.pop("head_dim", None)
    if wide:
        inner = next(key for key in plain if key.endswith("intermediate_size"))
        changes["wide"] = odd | {"head_dim": 20, inner: 41}
        if model_type not in DIVIDING:
            changes["undivided"] = {"num_attention_heads": 5, "num_key_value_heads": 5,
                                    "head_dim": 4}  # fmt: skip
    for n, biases in enumerate(BIASED.get(model_type, ())):
        changes[f"biases{n}"] = biases
    if model_type in WINDOWED:
        layers = plain["num_hidden_layers"]
        kinds = {"mixed": _MIXED[:layers], "sliding": ["sliding_attention"] * layers}
        used: Case = {"sliding_window": 7}
        if model_type == "smollm3":
            used["use_sliding_window"] = True
        for name, types in kinds.items():
            changes[name] = used | {"layer_types": types}
        if model_type != "smollm3":
            changes["full"] = used | {"layer_types": ["full_attention"] * layers}
    changes |= OTHERS.get(model_type, {})
    cases = {name: plain | change for name, change in changes.items()}
    rotated = (0.25, 0.5, 1.0) if model_type in PARTIAL else (1.0,)
    for share in rotated:
        ropes = ROPES | {"longrope": longrope(int(width * share) // 2 or 1)}
        if model_type == "gemma4_text":  # its LongRoPE fails in transformers
            ropes.pop("longrope")
        if int(width * share) % 2:
            continue
        for kind, rope in ropes.items():
            part = {"partial_rotary_factor": share} if model_type in PARTIAL else {}
            cases[f"{kind},{share}"] = _roped(model_type, plain, rope | part)
    return cases


_SMALL = {
    "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 64, "intermediate_size": 48,
}  # fmt: skip
_CHUNKED = {"layer_types": ["chunked_attention"] * 4}
MODERN_REFUSED: list[tuple[str, Case, str]] = [
    (name, _SMALL | changes, message)
    for name, changes, message in (
        ("ministral", _CHUNKED, "layer_types is .*chunked_attention"),
        ("ministral3", {"rope_parameters": LLAMA3}, "llama_4_scaling_beta must be 0 or more"),
        ("cwm", {"attention_bias": True}, "attention_bias is True .*has no biases"),
        ("seed_oss", {"attention_bias": False, "attention_out_bias": True},
         "attention_out_bias is True .*attention_bias is False"),
        ("hunyuan_v1_dense", {"use_cla": True}, "use_cla is True .*cannot share"),
        ("ernie4_5", {"attention_dropout": 0.5}, "attention_dropout is 0.5 .*no dropout"),
        ("helium", {"mlp_bias": 3}, "mlp_bias is 3 .*true or false"),
        ("smollm3", {"no_rope_layers": [1, 0]}, r"no_rope_layers is \[1, 0\] .*each of 4 blocks"),
        ("olmo", {"clip_qkv": "no"}, "clip_qkv is 'no' .*a number"),
        ("olmo2", {"sliding_window": 9}, "effect of sliding_window = 9"),
        ("olmo3", {"rope_parameters": {"sliding_attention": YARN}}, "cannot be scaled in sliding"),
        ("olmo3", {"rope_parameters": YARN}, "expected full_attention and sliding_attention"),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern is 'LLLG'"),
        ("granite", {"residual_multiplier": 0.0}, "residual_multiplier is 0.0 .*positive"),
        ("granitemoehybrid", {"layer_types": ["linear_attention"] * 4}, "layers of Mamba"),
        ("granitemoehybrid", {"layer_types": ["full_attention"] * 4, "num_local_experts": 2},
         "num_local_experts is 2 .*dense model"),
        ("granite_swa", {"layer_rope_theta": [1.0, 2.0, 3.0, 2.0]}, "all blocks of a kind"),
        ("granite_swa", {"layer_rope_theta": [1.0, 2.0]}, "a number, 0 or more, for 4 blocks"),
        ("hyperclovax", {"logits_scaling": -1.0}, "logits_scaling is -1.0 .*positive"),
        ("glm", {"partial_rotary_factor": 0.1, "head_dim": 8}, "--rotary-percent 0.1 .*0 channels"),
        ("cohere", {"logit_scale": 0}, "logit_scale is 0.0 .*positive"),
        ("cohere2", {"head_dim": 12}, "head_dim is 12 .*8 channels"),
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm is True .*normalises no"),
        ("cohere_compass_text", {"rope_parameters": PLAIN}, "expected an object or null"),
        ("cohere_compass_text", {"rope_parameters": _BOTH | {"sliding_attention": YARN}},
         "cannot be scaled in sliding_attention alone"),
        ("gemma", {"use_bidirectional_attention": True}, "attention must be causal"),
        ("vaultgemma", {"attention_bias": True}, "attention_bias is True"),
        ("nemotron", {"hidden_act": "silu"}, "hidden_act is 'silu' .*relu2"),
        ("bitnet", {"quantization_config": {"quant_method": "bitnet"}}, "quantization_config"),
        ("nanochat", {"mlp_bias": True}, "mlp_bias is True .*has no biases"),
        ("arcee", {"rope_scaling": {"rope_type": "proportional"}}, "needs partial_rotary"),
    )
]  # fmt: skip
"""Values that are refused, and the end of the message."""

QWEN2 = {"add_qkv_bias": True}
GEMMA2 = {
    "glu_activation": "geglu", "swiglu": False, "apply_layernorm_1p": True, "post_norm": True,
    "scale_embeddings": True,
}  # fmt: skip
_OLMO2 = {"llama": True, "qk_layernorm": True, "pre_norm": False, "post_norm": True}
_GLM = {"llama": True, "rotary_interleaved": True, "rotary_percent": 0.5}
_COHERE = {
    "llama": True, "normalization": "UnbiasedLayerNorm", "parallel_residual": True,
    "shared_parallel_norm": True, "rotary_interleaved": True,
}  # fmt: skip
_WINDOW_FLAGS = {"sliding_window": 9, "window_attn_skip_freq": 4}
_UNGATED = {"llama": True, "swiglu": False, "squared_relu": True}
MODERN_FLAGS: dict[str, Case] = {
    "ministral": {"llama": True, **_WINDOW_FLAGS}, "cwm": {"llama": True, **_WINDOW_FLAGS},
    "ministral3": {"llama": True, "attention_temperature": 0.1,
                   "attention_temperature_rotary": True},
    "bitnet": {"llama": True, "swiglu": False, "glu_activation": "squared_reglu",
               "sub_norm": True},
    "seed_oss": {"llama": True, **QWEN2}, "helium": {"llama": True, **QWEN2},
    "hunyuan_v1_dense": {"llama": True, "qk_layernorm": True, "qk_layernorm_after_rope": True},
    "ernie4_5": {"llama": True, "attention_dropout": 0.0},
    "smollm3": {"llama": True, "no_rope_freq": 4},
    "olmo": {"llama": True, "normalization": "PlainLayerNorm", "norm_epsilon": 1e-5},
    "olmo2": _OLMO2 | {"qk_layernorm_whole": True},
    "olmo3": _OLMO2 | {"qk_layernorm_whole": True, **_WINDOW_FLAGS},
    "exaone4": _OLMO2 | {"num_layers": 3, "no_rope_freq": 3, "sliding_window": 9,
                        "window_attn_skip_freq": 3},
    "granite": {"llama": True, "residual_multiplier": 0.22},
    "granitemoehybrid": {"llama": True, "embedding_multiplier": 12.0},
    "granite_swa": {"llama": True, "softmax_type": "learnable", **_WINDOW_FLAGS},
    "hyperclovax": {"llama": True, "post_norm": True},
    "glm": _GLM, "glm4": _GLM | {"post_norm": True},
    "cohere": _COHERE,
    "cohere2": _COHERE | {"num_layers": 3, "no_rope_freq": 3, "sliding_window": 9,
                        "window_attn_skip_freq": 3},
    "cohere_compass_text": {key: value for key, value in _COHERE.items()
                            if key != "rotary_interleaved"} | _WINDOW_FLAGS,
    "gemma": {key: value for key, value in GEMMA2.items() if key != "post_norm"}
    | {"llama": True},
    "vaultgemma": {key: value for key, value in GEMMA2.items() if key != "post_norm"}
    | {"llama": True, "sliding_window": 9},
    "arcee": _UNGATED, "jais2": _UNGATED | {"normalization": "LayerNorm"},
    "nemotron": _UNGATED | {"normalization": "LayerNorm", "apply_layernorm_1p": True,
                           "rotary_percent": 0.5},
    "apertus": {"llama": True, "swiglu": False, "xielu": True, "qk_layernorm": True},
    "nanochat": _UNGATED | {"normalization": "PlainRMSNorm", "qk_l2_norm": True,
                           "embed_layernorm": True},
    "internlm3": {"llama": True}, "iquestcoder": {"llama": True},
    "gemma4_text": GEMMA2 | {
        "llama": True, "apply_layernorm_1p": False, "qk_layernorm": True, "sliding_window": 9,
        "rotary_base_local": 7.0, "query_pre_attn_scalar": 1.0, "value_norm": True,
        "block_scalar": True, "global_kv_channels": 12, "window_attn_skip_freq": "[1,0]",
    },
}  # fmt: skip
"""Flags of the plainest model of each architecture."""
