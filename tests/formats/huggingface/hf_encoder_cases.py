"""Small encoders, and encoders with decoders, next to BERT and T5, as those of :mod:`hf_cases`."""

from typing import Any

from hf_cases import BERT, LABELS, T5_11
from hf_modern_cases import ROPES

Case = dict[str, Any]

_ROBERTA = BERT | {"pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 44}
_ELECTRA = BERT | {"embedding_size": BERT["hidden_size"]}
_DISTIL = {
    "vocab_size": 61, "dim": 36, "hidden_dim": 50, "n_layers": 3, "n_heads": 3,
    "max_position_embeddings": 40, "dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip


def _robertas(name: str) -> dict[str, Case]:
    """For masked tokens, labels, choices and spans, tied or not, and at another padding token."""
    one, labels, choices, span = (
        {"architectures": [f"{name}For{task}"]}
        for task in ("MaskedLM", "SequenceClassification", "MultipleChoice", "QuestionAnswering")
    )
    return {
        case: _ROBERTA | changes
        for case, changes in {
            "tied": one,
            "untied": one | {"tie_word_embeddings": False, "layer_norm_eps": 1e-2},
            "gelu_new": one | {"hidden_act": "gelu_new", "type_vocab_size": 3},
            "relu,odd_heads": one
            | {"hidden_act": "relu", "num_attention_heads": 9, "pad_token_id": 0},
            "labels": labels | LABELS,
            "number": labels | {"num_labels": 1, "problem_type": "regression"},
            "choices": choices | {"type_vocab_size": 2},
            "span": span,
        }.items()
    }


_MODERN_SIZES = {
    "vocab_size": 61, "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 5,
    "num_attention_heads": 3, "max_position_embeddings": 40, "local_attention": 12,
    "cls_token_id": None, "sep_token_id": None,
}  # fmt: skip
_ALL_BIASED = {"attention_bias": True, "mlp_bias": True, "classifier_bias": True}
_LOCAL = {"rope_type": "default", "rope_theta": 500.0}
_MODERN = {
    case: _MODERN_SIZES | changes
    for case, changes in {
        "tied": {},
        "untied": {"tie_word_embeddings": False, "norm_eps": 1e-2},
        "biases": _ALL_BIASED | {"norm_bias": True},
        "attention_biases": {"attention_bias": True, "hidden_activation": "silu"},
        "mlp_biases": {"mlp_bias": True, "classifier_bias": True, "local_attention": 7},
        "odd_heads": {"num_attention_heads": 9, "hidden_activation": "gelu_pytorch_tanh",
                      "classifier_activation": "relu"},
        "whole": {"layer_types": ["full_attention"] * 5},
        "mixed": {"layer_types": ["sliding_attention", "full_attention", "full_attention",
                                  "sliding_attention", "sliding_attention"]},
        **{
            kind: {"rope_parameters": {"full_attention": rope, "sliding_attention": _LOCAL}}
            for kind, rope in ROPES.items()
        },
    }.items()
}  # fmt: skip


_BART = {
    "vocab_size": 61, "d_model": 36, "encoder_ffn_dim": 50, "decoder_ffn_dim": 50,
    "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 3,
    "decoder_attention_heads": 3, "max_position_embeddings": 40, "dropout": 0.0,
    "decoder_start_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip
_BARTS = {
    "tied": _BART,
    "scaled,odd_heads": _BART
    | {"scale_embedding": True, "encoder_attention_heads": 9, "decoder_attention_heads": 9},
    "relu": _BART | {"activation_function": "relu", "encoder_layers": 3, "decoder_layers": 1},
}


ENCODER_CASES: dict[str, dict[str, Case]] = {
    "roberta": _robertas("Roberta"),
    "xlm-roberta": _robertas("XLMRoberta"),
    "camembert": _robertas("Camembert"),
    "electra": {
        case: _ELECTRA | {"architectures": ["ElectraForMaskedLM"]} | changes
        for case, changes in {
            "tied": {},
            "untied": {"tie_word_embeddings": False, "type_vocab_size": 1},
            "relu,odd_heads": {"hidden_act": "relu", "num_attention_heads": 9},
            "span": {"architectures": ["ElectraForQuestionAnswering"], "layer_norm_eps": 1e-2},
        }.items()
    },
    "distilbert": {
        "tied": _DISTIL,
        "untied": _DISTIL | {"tie_word_embeddings": False},
        "relu,odd_heads": _DISTIL | {"activation": "relu", "n_heads": 9, "n_layers": 2},
        "gelu_new": _DISTIL | {"activation": "gelu_new"},
    },
    "modernbert": _MODERN,
    "bart": _BARTS,
    "mbart": _BARTS,
    "plbart": _BARTS,
    "umt5": {
        "untied": T5_11 | {"num_layers": 3, "num_decoder_layers": 2},
        "tied": T5_11 | {"tie_word_embeddings": True, "num_layers": 1, "num_decoder_layers": 2},
        "odd": T5_11 | {"num_heads": 3, "d_kv": 5, "d_ff": 21, "feed_forward_proj": "gated-silu",
                        "relative_attention_num_buckets": 7},
        "relu": T5_11 | {"feed_forward_proj": "relu", "layer_norm_epsilon": 1e-2},
    },
    "mt5": {
        "untied": T5_11 | {"num_layers": 3, "num_decoder_layers": 1},
        "odd": T5_11 | {"num_heads": 3, "d_kv": 5, "d_ff": 21, "feed_forward_proj": "gated-silu",
                        "relative_attention_num_buckets": 7},
        "relu": T5_11 | {"feed_forward_proj": "relu", "layer_norm_epsilon": 1e-2},
    },
}  # fmt: skip

ENCODER_GRADIENTS = [
    (model_type, case)
    for model_type, cases in ENCODER_CASES.items()
    for case in cases
    # Its bias has two names there, of which one has no gradient.
    if not (case == "untied" and model_type in ("roberta", "xlm-roberta", "camembert"))
]

ENCODER_REFUSED: list[tuple[str, Case, str]] = [
    ("roberta", {"pad_token_id": None}, "pad_token_id is None .*first position is the row after"),
    ("roberta", {"pad_token_id": 9, "max_position_embeddings": 10}, "10 rows are before the first"),
    ("roberta", {"architectures": ["RobertaForTokenClassification"]}, "such a class is read for"),
    ("roberta", {"is_decoder": True}, "is_decoder is True .*cannot be represented"),
    ("electra", {}, "embedding_size is 128 .*the width of hidden states, 256"),
    ("electra", {"architectures": ["ElectraForPreTraining"]}, "read for MaskedLM, QuestionAnsw"),
    ("modernbert", {"architectures": ["ModernBertForTokenClassification"]}, "read for MaskedLM$"),
    ("modernbert", {"classifier_bias": True}, "classifier_bias is True .*mlp_bias is False"),
    ("modernbert", {"decoder_bias": False}, "decoder_bias is False .*have a bias"),
    ("modernbert", {"mlp_dropout": 0.1}, "mlp_dropout is 0.1 .*there is one dropout"),
    ("modernbert", {"global_attn_every_n_layers": 0}, "every_n_layers is 0 .*positive integer"),
    ("modernbert", {"local_rope_theta": None}, "local_rope_theta is None .*a number"),
    ("bart", {"decoder_ffn_dim": 7}, "decoder_ffn_dim is 7 .*the encoder has 4096"),
    ("bart", {"tie_word_embeddings": False}, "tie_word_embeddings is False .*a table of the enc"),
    ("bart", {"encoder_layerdrop": 0.1}, "encoder_layerdrop is 0.1 .*never left out"),
    ("bart", {"normalize_before": True}, "normalize_before is True"),
    ("mbart", {"architectures": ["MBartForSequenceClassification"]}, "read for texts alone"),
    ("distilbert", {"architectures": ["DistilBertForSequenceClassification"]}, "for MaskedLM$"),
    ("distilbert", {"activation": "silu"}, "activation is 'silu' .*expected one of gelu"),
]  # fmt: skip
"""Values that are refused, and the end of the message."""
