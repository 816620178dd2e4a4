"""Small encoders, and encoders with decoders, next to BERT and T5, as those of :mod:`hf_cases`."""

from typing import Any

from hf_cases import BERT, LABELS, T5_11

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
    ("distilbert", {"architectures": ["DistilBertForSequenceClassification"]}, "for MaskedLM$"),
    ("distilbert", {"activation": "silu"}, "activation is 'silu' .*expected one of gelu"),
]  # fmt: skip
"""Values that are refused, and the end of the message."""
