"""Small models of decoders of 2019 to 2023, as those of :mod:`hf_cases`."""

from typing import Any

Case = dict[str, Any]

_SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 40,
}  # fmt: skip
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_ODD = {"hidden_size": 42, "num_attention_heads": 3, "intermediate_size": 23}
"""Three heads of 14 channels."""
_SQUARE = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3}


def _rope(kind: str, share: float | None = None, **values: Any) -> Case:
    form = {"rope_type": kind, "rope_theta": 500.0} | values
    return {"rope_parameters": form if share is None else form | {"partial_rotary_factor": share}}


def _ropes(share: float | None = None, width: int = 8) -> dict[str, Case]:
    """Each kind of RoPE scaling, of heads of this width."""
    pairs, longer = int(width * (share or 1.0)) // 2, {"original_max_position_embeddings": 16}
    factors = [1.0 + 0.3 * pair for pair in range(pairs)]
    return {
        "plain_rope": _rope("default", share),
        "linear": _rope("linear", share, factor=4.0),
        "dynamic": _rope("dynamic", share, factor=2.0),
        "yarn": _rope("yarn", share, factor=2.5, **longer),
        "llama3": _rope("llama3", share, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                        **longer),
        "longrope": longer | _rope("longrope", share, short_factor=factors,
                                   long_factor=[2 * x for x in factors], **longer),
    }  # fmt: skip


def _each(sizes: Case, plain: str, /, **further: Case) -> dict[str, Case]:
    """The case ``plain`` of these sizes, and others with changes."""
    return {plain: sizes} | {name: sizes | changes for name, changes in further.items()}


_TIED = {"tie_word_embeddings": True}
_UNTIED = {"tie_word_embeddings": False}
_ONE_KEY = {"num_key_value_heads": 1}
_WIDE = {"head_dim": 12}

_GPT2 = {
    "vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
_ODD_GPT2 = {"n_embd": 42, "n_head": 3, "n_inner": 50}
_GPTJ = _GPT2 | {"rotary_dim": 4}
_NEO = {
    "vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
    "max_position_embeddings": 40, "window_size": 7,
    "attention_types": [[["global", "local"], 1]],
}  # fmt: skip
_BIOGPT = _SIZES | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_XGLM = {
    "vocab_size": 61, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4,
    "max_position_embeddings": 40, "dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
_MPT = {"vocab_size": 61, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 40}

CLASSIC_CASES: dict[str, dict[str, Case]] = {
    "stablelm": _each(
        _GROUPED, "grouped",
        biases=_TIED | {"use_qkv_bias": True, "num_key_value_heads": 4},
        parallel={"use_parallel_residual": True, "use_qkv_bias": True} | _ONE_KEY,
        odd=_ODD | {"num_key_value_heads": 3, "layer_norm_eps": 1e-2} | _rope("default", 0.72),
        square=_SQUARE | _TIED | _rope("default", 1.0),
        normalised={"qk_layernorm": True, "use_parallel_residual": True} | _SQUARE
        | _rope("default", 0.5),
        geglu={"hidden_act": "gelu_pytorch_tanh"},
        quick={"hidden_act": "quick_gelu"},
        **_ropes(0.5),
    ),
    "starcoder2": _each(
        _GROUPED, "grouped",
        window=_UNTIED | {"sliding_window": 7} | _ONE_KEY,
        no_biases={"use_bias": False},
        odd=_ODD | {"num_key_value_heads": 3, "norm_epsilon": 1e-2},
        wide=_WIDE | _UNTIED, square=_SQUARE,
        relu={"hidden_act": "relu"}, gelu={"hidden_act": "gelu"}, relu2={"hidden_act": "relu2"},
        **_ropes(),
    ),
    "phi": _each(
        _GROUPED, "grouped",
        each_head={"num_key_value_heads": None}, tied=_TIED | _ONE_KEY,
        normalised={"qk_layernorm": True, "layer_norm_eps": 1e-2},
        odd=_ODD | {"num_key_value_heads": 3} | _rope("default", 0.3),
        wide=_WIDE | _rope("default", 0.5), square=_SQUARE | _rope("default", 1.0),
        gelu={"hidden_act": "gelu"}, relu={"hidden_act": "relu"},
        **_ropes(0.5),
    ),
    "persimmon": _each(
        _SIZES, "normalised",
        plain={"qk_layernorm": False}, tied=_TIED,
        odd=_ODD | {"layer_norm_eps": 1e-2} | _rope("default", 0.72),
        whole=_rope("default", 1.0), one_head={"num_attention_heads": 1},
        gelu={"hidden_act": "gelu_new"}, relu={"hidden_act": "relu"},
        **_ropes(0.5),
    ),
    "gpt_bigcode": _each(
        _GPT2, "multi_query",
        each_head={"multi_query": False} | _UNTIED, inner={"n_inner": 23, "n_positions": 47},
        odd=_ODD_GPT2, odd_each_head=_ODD_GPT2 | {"multi_query": False},
        one_head={"n_head": 1}, gelu={"activation_function": "gelu"},
        relu={"activation_function": "relu", "layer_norm_epsilon": 1e-2},
    ),
    "gpt_neo": _each(
        _NEO, "local",
        irregular=_UNTIED | {"num_layers": 5, "attention_types": [
            [["global", "local", "local"], 1], [["local", "global"], 1]]},
        all_local={"attention_types": [[["local"], 2]]},
        all_global={"attention_types": [[["global"], 2]], "window_size": 256},
        odd={"hidden_size": 42, "num_heads": 3, "intermediate_size": 23},
        wide={"window_size": 39}, gelu={"activation_function": "gelu"},
        relu={"activation_function": "relu", "layer_norm_epsilon": 1e-2},
    ),
    "biogpt": _each(
        _BIOGPT, "tied",
        untied=_UNTIED, unscaled={"scale_embedding": False, "hidden_act": "gelu_new"},
        odd=_ODD | {"hidden_act": "relu"}, one_head={"num_attention_heads": 1},
    ),
    "xglm": _each(
        _XGLM, "tied",
        untied=_UNTIED, unscaled={"scale_embedding": False, "activation_function": "gelu_new"},
        odd={"d_model": 35, "attention_heads": 5, "ffn_dim": 23, "activation_function": "relu"},
        one_head={"attention_heads": 1},
    ),
    "gptj": _each(
        _GPTJ, "untied",
        tied=_TIED, whole={"rotary_dim": 8}, inner={"n_inner": 23, "n_positions": 47},
        odd=_ODD_GPT2 | {"rotary_dim": 6}, thin=_ODD_GPT2 | {"rotary_dim": 2},
        one_head={"n_head": 1, "rotary_dim": 22}, gelu={"activation_function": "gelu"},
        relu={"activation_function": "relu", "layer_norm_epsilon": 1e-2},
    ),
    "codegen": _each(
        _GPTJ, "untied",
        tied=_TIED, eight={"n_head": 8, "rotary_dim": 2}, inner={"n_inner": 23},
        odd={"n_embd": 72, "n_head": 12, "rotary_dim": 4},
        relu={"activation_function": "relu", "layer_norm_epsilon": 1e-2},
    ),
    "mpt": _each(
        _MPT, "tied",
        untied=_UNTIED | {"n_heads": 8}, six={"n_heads": 6, "d_model": 42}, three={
            "n_heads": 3, "d_model": 33, "layer_norm_epsilon": 1e-2},
        twelve={"n_heads": 12, "d_model": 36}, one_head={"n_heads": 1},
        clipped={"attn_config": {"clip_qkv": 0.7, "softmax_scale": 0.3}},
    ),
}  # fmt: skip
"""Cases by architecture and name; the first is the default one's."""

_ONE_NORM = {
    "position_embedding_type": "rope", "parallel_residual": True, "shared_parallel_norm": True,
}  # fmt: skip
_GPTJ_FLAGS = _ONE_NORM | {
    "rotary_interleaved": True, "add_bias_linear": False, "add_mlp_bias": True,
    "lm_head_bias": True,
}  # fmt: skip
_GPT_NEO_FLAGS = {
    "add_bias_linear": False, "add_mlp_bias": True, "add_proj_bias": True,
    "query_pre_attn_scalar": 1.0,
}  # fmt: skip
_FAIRSEQ = {"position_embedding_offset": 2, "scale_embeddings": True}
CLASSIC_FLAGS: dict[str, Case] = {
    "stablelm": {"llama": True, "normalization": "LayerNorm", "rotary_percent": 0.75},
    "starcoder2": {"position_embedding_type": "rope"},
    "phi": _ONE_NORM | {"lm_head_bias": True, "rotary_percent": 0.75},
    "persimmon": {"position_embedding_type": "rope", "qk_layernorm": True},
    "gpt_bigcode": {"num_query_groups": 1}, "gpt_neo": _GPT_NEO_FLAGS | {"sliding_window": 9},
    "biogpt": _FAIRSEQ, "xglm": _FAIRSEQ | {"position_embedding_type": "sinusoidal"},
    "gptj": _GPTJ_FLAGS | {"rotary_percent": 0.75}, "codegen": _GPTJ_FLAGS,
    "mpt": {
        "position_embedding_type": "alibi", "normalization": "UnbiasedLayerNorm",
        "add_bias_linear": False, "bias_gelu_fusion": False, "ffn_hidden_size": 128},
}  # fmt: skip
"""Flags of the plainest model of each architecture."""
CLASSIC_FITTING: list[tuple[Case, str]] = [
    ({"llama": True, "normalization": "LayerNorm"}, "stablelm"),
    ({"llama": True, "normalization": "LayerNorm", "add_qkv_bias": True}, "stablelm"),
    ({"position_embedding_type": "rope", "sliding_window": 9}, "starcoder2"),
    (_ONE_NORM | {"lm_head_bias": True}, "phi"),
    ({"position_embedding_type": "rope", "qk_layernorm": True}, "persimmon"),
    ({"num_query_groups": 1}, "gpt_bigcode"),
    (_GPT_NEO_FLAGS | {"sliding_window": 9, "window_attn_skip_freq": "[0,1]"}, "gpt_neo"),
    (_FAIRSEQ, "biogpt"), (_FAIRSEQ | {"position_embedding_type": "sinusoidal"}, "xglm"),
    (_GPTJ_FLAGS, "gptj"), (_GPTJ_FLAGS | {"rotary_percent": 0.5}, "gptj"),
]  # fmt: skip
"""Flags, and the plainest architecture that has such models."""
CLASSIC_REFUSED: list[tuple[str, Case, str]] = [
    ("mpt", {"no_bias": False}, "no_bias is False .*no biases"),
    ("mpt", {"attn_config": {"alibi": False}}, "alibi is False .*as if it were True"),
    ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln is True .*as if it were False"),
    ("mpt", {"attn_config": {"softmax_scale": 0}}, "softmax_scale is 0 .*positive number"),
    ("mpt", {"attn_config": {"attn_type": "multiquery_attention"}}, "head must have its keys"),
    ("mpt", {"attn_config": {"sliding_window_size": 9}}, "effect of sliding_window_size = 9"),
    ("stablelm", _GROUPED | {"hidden_act": "mish"}, "hidden_act is 'mish' .*gelu_pytorch_tanh"),
    ("starcoder2", _GROUPED | {"mlp_type": "gated"}, "mlp_type is 'gated' .*no gate"),
    ("phi", _GROUPED | {"qk_layernorm": True, "head_dim": 12}, "head_dim is 12 .*it must be 8"),
    ("phi", _SIZES | {"hidden_act": "silu"}, "hidden_act is 'silu' .*gelu_new"),
    ("persimmon", _SIZES | {"num_key_value_heads": 2}, "effect of num_key_value_heads = 2"),
    ("gpt_bigcode", {"num_key_value_heads": 4}, "num_key_value_heads is 4 .*multi_query is True"),
    ("gpt_bigcode", {"add_cross_attention": True, "multi_query": False}, "cross-attention"),
    ("gpt_bigcode", {"scale_attn_weights": False}, "attention scores are always scaled"),
    ("gpt_neo", {"attention_types": [[["global", "near"], 12]]}, "expected lists of global, local"),
    ("gpt_neo", {"attention_types": [[["global"], 3]]}, "there are 24 blocks, not 3"),
    ("gpt_neo", {"attention_layers": ["local"] * 24}, "attention_layers is .*attention_types says"),
    ("biogpt", {"layerdrop": 0.1}, "layerdrop is 0.1 .*cannot be dropped"),
    ("biogpt", {"activation_dropout": 0.1}, "activation_dropout is 0.1 .*no dropout of its own"),
    ("xglm", {"pad_token_id": 5}, "pad_token_id is 5 .*position 3 no embedding"),
    ("xglm", {"add_cross_attention": True}, "cross-attention cannot be represented"),
    ("gptj", {"rotary_dim": None}, "rotary_dim is None .*positive integer"),
    ("gptj", {"rotary_dim": 512}, "rotary_dim is 512 .*a head has 256 channels"),
    ("codegen", {"n_head": 2, "n_embd": 64, "rotary_dim": 8}, "n_head is 2 .*4 must divide it"),
]  # fmt: skip
"""Values that are refused, and the end of the message."""
