"""Small models of each architecture, as keyword arguments of transformers' own config classes."""

from typing import Any

Case = dict[str, Any]

_SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 40,
    "attention_dropout": 0.0,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 2.5,
    "original_max_position_embeddings": 16,
}  # fmt: skip
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 1.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.5],
    "original_max_position_embeddings": 16,
}  # fmt: skip


def _shared(sizes: Case, **further: Case) -> dict[str, Case]:
    """Grouped queries or not, tied or not, and what the architecture has besides."""
    return {
        name: sizes | changes
        for name, changes in {
            "kv_heads=4,untied": {"tie_word_embeddings": False},
            "kv_heads=4,tied": {"tie_word_embeddings": True},
            "kv_heads=2,untied": {"tie_word_embeddings": False, "num_key_value_heads": 2},
            "kv_heads=1,tied": {"tie_word_embeddings": True, "num_key_value_heads": 1},
            **further,
        }.items()
    }


_GPT2 = {
    "vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
_NEOX = _SIZES | {"hidden_dropout": 0.0}
del _NEOX["num_key_value_heads"]
_OPT = {
    "vocab_size": 61, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 40, "word_embed_proj_dim": 32,
    "dropout": 0.0,
}  # fmt: skip
_FALCON = {
    "vocab_size": 61, "hidden_size": 32, "ffn_hidden_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 40,
}  # fmt: skip
_BLOOM = {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4}
_GEMMA2 = _SIZES | {"head_dim": 8, "num_hidden_layers": 3, "query_pre_attn_scalar": 12}
_GEMMA3 = _SIZES | {"head_dim": 8, "num_hidden_layers": 3, "query_pre_attn_scalar": 12}
T5 = {
    "vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
    "dropout_rate": 0.0, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0,
}  # fmt: skip
T5_11 = T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
_WINDOW = {"sliding_window": 7}
_QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 7}

BERT = {
    "vocab_size": 61, "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 3,
    "num_attention_heads": 3, "max_position_embeddings": 40, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip

LABELS = {
    "id2label": {0: "entailment", 1: "neutral", 2: "contradiction"},
    "label2id": {"entailment": 0, "neutral": 1, "contradiction": 2},
    "problem_type": "single_label_classification",
}


def _berts(name: str) -> dict[str, Case]:
    """With the second head and without, and what a BERT has besides."""
    both, one, labels, choices, span = (
        {"architectures": [f"{name}For{task}"]}
        for task in (
            "PreTraining", "MaskedLM", "SequenceClassification", "MultipleChoice",
            "QuestionAnswering",
        )
    )  # fmt: skip
    return {
        case: BERT | changes
        for case, changes in {
            "pretraining": both,
            "pretraining,gelu_new": both | {"hidden_act": "gelu_new", "type_vocab_size": 3},
            "pretraining,untied": both | {"tie_word_embeddings": False},
            "masked_lm": one,
            "masked_lm,relu": one | {"hidden_act": "relu", "type_vocab_size": 1},
            "masked_lm,untied": one | {"tie_word_embeddings": False, "layer_norm_eps": 1e-2},
            "labels": labels | LABELS,
            "labels,unnamed": labels
            | {"num_labels": 4, "problem_type": "single_label_classification"},
            "number": labels | {"num_labels": 1, "problem_type": "regression"},
            "choices": choices | {"hidden_act": "gelu_new", "type_vocab_size": 3},
            "span": span | {"type_vocab_size": 1},
        }.items()
    }


CASES: dict[str, dict[str, Case]] = {
    "gpt2": {
        "tied": _GPT2,
        "untied": _GPT2 | {"tie_word_embeddings": False},
        "relu": _GPT2 | {"activation_function": "relu"},
        "gelu": _GPT2 | {"activation_function": "gelu", "layer_norm_epsilon": 1e-2},
        "inner": _GPT2 | {"n_inner": 48, "activation_function": "relu2"},
        "one_head": _GPT2 | {"n_head": 1},
    },
    "llama": _shared(
        _SIZES,
        biases={"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2},
        attention_biases={"attention_bias": True, "num_key_value_heads": 2},
        head_dim={"head_dim": 12, "num_key_value_heads": 2},
        epsilon={"rms_norm_eps": 1e-2},
        geglu={"hidden_act": "gelu_pytorch_tanh"},
        llama3={"rope_parameters": _LLAMA3, "num_key_value_heads": 2},
        linear={"rope_parameters": _LINEAR},
        yarn={"rope_parameters": _YARN},
        dynamic={"rope_parameters": _DYNAMIC},
    ),
    "mistral": _shared(
        _SIZES,
        **{
            "window": _WINDOW | {"num_key_value_heads": 2},
            "no_window": {"sliding_window": None},
            "head_dim": {"head_dim": 12},
        },
    ),
    "qwen2": _shared(
        _SIZES,
        window=_QWEN_WINDOW | {"max_window_layers": 0, "num_key_value_heads": 2},
        pattern=_QWEN_WINDOW
        | {"layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True},
        yarn={"rope_parameters": _YARN},
    ),
    "qwen3": _shared(
        _SIZES | {"head_dim": 12},
        window=_QWEN_WINDOW | {"max_window_layers": 0, "num_key_value_heads": 2},
    ),
    "phi3": _shared(
        _SIZES,
        window=_WINDOW | {"num_key_value_heads": 2},
        partial={"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                     "partial_rotary_factor": 0.75}},
        longrope={"rope_parameters": _LONGROPE, "original_max_position_embeddings": 16},
        partial_longrope={
            "rope_parameters": _LONGROPE | {"partial_rotary_factor": 0.5,
                                            "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]},
            "original_max_position_embeddings": 16,
        },
    ),
    "gemma2": _shared(
        _GEMMA2,
        window=_WINDOW | {"num_key_value_heads": 2},
        caps=_WINDOW | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5},
        no_caps={"attn_logit_softcapping": None, "final_logit_softcapping": None},
        full={"layer_types": ["full_attention"] * 3},
    ),
    "gemma3_text": _shared(
        _GEMMA3 | {"num_hidden_layers": 7},
        window=_WINDOW | {"num_key_value_heads": 2},
        scaled=_WINDOW | {"rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        }},
        pattern=_WINDOW | {"layer_types": ["sliding_attention", "full_attention"] * 3
                           + ["sliding_attention"]},
        irregular=_WINDOW | {"layer_types": ["full_attention", "sliding_attention"] * 2
                             + ["sliding_attention"] * 3},
        cap={"final_logit_softcapping": 1.5},
    ),
    "gpt_neox": {
        "untied": _NEOX,
        "tied": _NEOX | {"tie_word_embeddings": True},
        "sequential": _NEOX | {"use_parallel_residual": False},
        "rotated_whole": _NEOX | {"rope_parameters": {
            "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}},
        "linear": _NEOX | {"rope_parameters": _LINEAR | {"partial_rotary_factor": 0.5}},
        "gelu_fast": _NEOX | {"hidden_act": "gelu_fast"},
    },
    "opt": {
        "tied": _OPT,
        "untied": _OPT | {"tie_word_embeddings": False},
        "no_biases": _OPT | {"enable_bias": False},
        "gelu": _OPT | {"activation_function": "gelu"},
    },
    "falcon": {
        "7b": _FALCON,
        "7b,untied": _FALCON | {"tie_word_embeddings": False},
        "7b,biases": _FALCON | {"bias": True},
        "each_head": _FALCON | {"multi_query": False},
        "sequential": _FALCON | {"parallel_attn": False, "bias": True},
        "sequential,each_head": _FALCON | {"parallel_attn": False, "multi_query": False},
        "40b": _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
        "40b,kv_heads=4": _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 4,
                                     "tie_word_embeddings": False},
        "11b": _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2,
                          "num_ln_in_parallel_attn": 1},
    },
    "bloom": {
        "tied": _BLOOM,
        "untied": _BLOOM | {"tie_word_embeddings": False},
        "six_heads": _BLOOM | {"n_head": 6, "hidden_size": 48},
    },
    "bert": _berts("Bert"),
    "megatron-bert": _berts("MegatronBert"),
    "t5": {
        "1.0": T5 | {"num_decoder_layers": 3},
        "1.1": T5_11 | {"num_layers": 3, "num_decoder_layers": 1},
        "odd": T5_11 | {"num_heads": 3, "d_kv": 5, "d_ff": 21, "feed_forward_proj": "gated-silu",
                         "relative_attention_num_buckets": 7},
        "wide": T5 | {"num_heads": 7, "d_kv": 16, "feed_forward_proj": "gelu",
                       "relative_attention_max_distance": 128},
    },
}  # fmt: skip
"""Cases by architecture and name."""
