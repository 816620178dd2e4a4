"""Relatives of BERT in Hugging Face format: RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, DistilBERT
and ModernBERT.

Except in ModernBERT, blocks are the same as BERT's; names and heads differ. In RoBERTa's position
embeddings, the first position is row ``pad_token_id`` + 1, the row after padding. The output heads
of RoBERTa and ELECTRA compute exact GELU, regardless of the MLP.

ModernBERT is a pre-norm encoder with rotary positions, a gated MLP, and a norm on the embeddings
instead of before the first attention. The first block and every N-th after it have full attention.
The others have a sliding window and a different rotary base.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron.config import ModelConfig
from megatron.config.patterns import every_first, shortest
from megatron.features.masked.hf_bert import (
    BERT,
    MASKED_LM,
    class_named,
    copies_of,
    dense,
    has_head,
    lm_head,
    predicts,
    read_bert,
    sum_norm,
    token_types,
    write_labels,
)
from megatron.formats.features import Requirement
from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.config_reader import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    FULL,
    GATES,
    SLIDING,
    HFConfigReader,
    agreed,
    layer_types,
    read_biases,
    read_scaling,
    read_windows,
    write_biases,
    write_rope,
)
from megatron.formats.huggingface.entries import (
    SEPARATE_QKV,
    Entry,
    attention_biased,
    block,
    linear,
    norm,
    qkv_biased,
    weight,
)
from megatron.formats.huggingface.layer_norm_decoders import SIZES
from megatron.formats.huggingface.llama import (
    DIVISIBLE,
    LOCAL_UNSCALED,
    by_kind,
    local_base,
    read_kinds,
)

_ONE_HEAD = Requirement(
    lambda m: not predicts(m) or not m.bert_binary_head, "--bert-no-binary-head"
)
_EXACT_HEAD = Requirement(
    lambda m: not predicts(m) or m.head_activation == "gelu_erf", "--lm-head-activation gelu_erf"
)


def _body(prefix: str, typed: bool = True) -> tuple[Entry, ...]:
    """Return the entries of BERT's embeddings and blocks with ``prefix`` instead of ``bert``."""

    def named(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(f"{prefix}.{name.removeprefix('bert.')}" for name in names)

    return tuple(
        replace(entry, theirs=named(entry.theirs), first=named(entry.first))
        for entry in BERT.entries
        if all(name.startswith(("bert.embeddings.", "bert.encoder.")) for name in entry.theirs)
        or entry.first
        if typed or "tokentype" not in entry.ours
    )


def _only(given: HFConfigReader, *tasks: str) -> None:
    """Raise CheckpointError if the class is for another task. In `transformers`, the suffix of a
    class name is its task."""
    for name in given.names("architectures") or []:
        if name.rpartition("For")[2] not in tasks:
            given.refuse("architectures", name, f"such a class is read for {', '.join(tasks)}")


def _read_roberta(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    _only(given, "MaskedLM", "SequenceClassification", "MultipleChoice", "QuestionAnswering")
    padding = given.content.get("pad_token_id", given.default("pad_token_id"))
    if isinstance(padding, bool) or not isinstance(padding, int) or padding < 0:
        given.refuse("pad_token_id", padding, "the first position is the row after it")
    offset, rows = padding + 1, fields["max_position_embeddings"]
    if rows <= offset:
        given.refuse(
            "max_position_embeddings", rows, f"{offset} rows are before the first position"
        )
    # Keys in files of transformers 2 and 3.
    given.unused("output_past", "gradient_checkpointing")
    read = read_bert(given, fields)
    return read | {"position_embedding_offset": offset, "max_position_embeddings": rows - offset}


def _write_roberta(model: ModelConfig) -> dict[str, Any]:
    positions = model.positions
    rows = positions.max_position_embeddings + positions.position_embedding_offset
    # The tokenizer's ids replace these values if there is a tokenizer. Without these keys,
    # transformers would assume its own defaults.
    tokens: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    tokens["pad_token_id"] = positions.position_embedding_offset - 1
    return write_labels(model) | tokens | {"max_position_embeddings": rows}


def _roberta(title: str, model_type: str, prefix: str) -> Architecture:
    # All three models use RoBERTa's tensor names.
    choice, label = has_head("multiple_choice"), has_head("classification")
    return replace(
        BERT,
        title=title,
        model_type=model_type,
        model_class=lambda model: class_named(prefix, model),
        entries=(
            *_body("roberta"),
            *lm_head("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias"),
            *dense("pooler.dense", "classifier.dense", label),
            *dense("pooler.dense", "roberta.pooler.dense", choice),
            *dense("classification_head", "classifier.out_proj", label),
            *dense("multichoice_head", "classifier", choice),
            *dense("span_head", "qa_outputs", has_head("span")),
        ),
        read=_read_roberta,
        write=_write_roberta,
        activations=ACTIVATIONS,
        features=BERT.features | {"position_embedding_offset"},
        requirements=(
            _ONE_HEAD,
            _EXACT_HEAD,
            Requirement(
                lambda m: m.positions.position_embedding_offset > 0,
                "--position-embedding-offset that is the padding token's number + 1",
            ),
        ),
        base_prefix="roberta.",
        endings={
            "lm_head.bias": "lm_head.decoder.bias",
            "lm_head.decoder.bias": "lm_head.bias",
        },
        nearest=lambda model: (model, ""),
        copies=copies_of("lm_head.decoder", "lm_head.bias"),
        # A model that was saved without its head may contain this pooler.
        ignored=lambda model: frozenset(
            () if choice(model) else (f"roberta.pooler.dense.{kind}" for kind in ("weight", "bias"))
        ),
        **token_types("roberta"),
    )


ROBERTA = _roberta("RoBERTa", "roberta", "Roberta")
XLM_ROBERTA = _roberta("XLM-RoBERTa", "xlm-roberta", "XLMRoberta")
CAMEMBERT = _roberta("CamemBERT", "camembert", "Camembert")


def _read_electra(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    _only(given, "MaskedLM", "QuestionAnswering")
    width, hidden = given.whole("embedding_size"), fields["hidden_size"]
    if width != hidden:
        given.refuse(
            "embedding_size", width, f"embeddings must have the width of hidden states, {hidden}"
        )
    given.unused("summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout")
    return read_bert(given, fields)


_GENERATOR = "generator_predictions"
ELECTRA = replace(
    BERT,
    title="ELECTRA",
    model_type="electra",
    model_class=lambda model: class_named("Electra", model),
    entries=(
        *_body("electra"),
        *lm_head(f"{_GENERATOR}.dense", f"{_GENERATOR}.LayerNorm", "generator_lm_head"),
        *dense("span_head", "qa_outputs", has_head("span")),
    ),
    read=_read_electra,
    write=lambda model: write_labels(model) | {"embedding_size": model.hidden_size},
    activations=ACTIVATIONS,
    requirements=(
        _ONE_HEAD,
        _EXACT_HEAD,
        Requirement(lambda m: m.head in ("lm", "span"), "the head of a language model or of spans"),
    ),
    base_prefix="electra.",
    endings={"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},
    nearest=lambda model: (model, ""),
    copies=copies_of("generator_lm_head"),
    ignored=lambda model: frozenset(),
    **token_types("electra"),
)  # fmt: skip


def _read_distilbert(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    _only(given, "MaskedLM")
    # Positions are always read from a table. Heads for labelled text are not read.
    given.unused("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_weights_")
    return {"bert_binary_head": False, "num_tokentypes": 0}


_EMBEDDINGS = "distilbert.embeddings"
DISTILBERT = Architecture(
    title="DistilBERT",
    model_type="distilbert",
    model_class="DistilBertForMaskedLM",
    entries=(
        *weight("embedding.word_embeddings", f"{_EMBEDDINGS}.word_embeddings"),
        *weight("embedding.position_embeddings", f"{_EMBEDDINGS}.position_embeddings"),
        *block(
            "distilbert.transformer.layer.{n}",
            linear("attention.qkv", "attention.q_lin", "attention.k_lin", "attention.v_lin",
                   form=SEPARATE_QKV),
            linear("attention.proj", "attention.out_lin"),
            norm("mlp_norm", "sa_layer_norm"),
            linear("mlp.up", "ffn.lin1"),
            linear("mlp.down", "ffn.lin2"),
        ),
        *block(
            "distilbert",
            sum_norm(
                "attention_norm", f"{_EMBEDDINGS}.LayerNorm",
                "transformer.layer.{before}.output_layer_norm",
            ),
        ),
        *norm("final_norm.norm", "distilbert.transformer.layer.{last}.output_layer_norm"),
        *lm_head("vocab_transform", "vocab_layer_norm", "vocab_projector"),
    ),
    keys={
        "max_position_embeddings": "max_position_embeddings",
        ("dim", "hidden_size"): "hidden_size",
        "hidden_dim": "ffn_hidden_size",
        ("n_layers", "num_hidden_layers"): "num_layers",
        ("n_heads", "num_attention_heads"): "num_attention_heads",
        "activation": "activation",
        "attention_dropout": "attention_dropout",
        "dropout": "hidden_dropout",
        "initializer_range": "init_method_std",
    },
    fixed={**BERT.fixed, "norm_epsilon": 1e-12},
    read=_read_distilbert,
    activations=BERT.activations,
    nearest=BERT.nearest,
    features=BERT.features - {"head"},
    requirements=(
        *BERT.requirements,
        _ONE_HEAD,
        Requirement(lambda m: not m.token_types, "--num-tokentypes 0"),
    ),
    base_prefix="distilbert.",
    copies=copies_of("vocab_projector"),
    family=BERT.family,
    task=BERT.task,
)  # fmt: skip


_EVERY, _WINDOW, _LOCAL_BASE = 3, 128, 10_000.0
"""Defaults of ModernBERT's configuration class: interval of blocks with full attention, sliding
window of the other blocks, and their rotary base."""
_HEAD: dict[str, dict[str, Any]] = {
    "gelu": {},
    "gelu_new": {"lm_head_activation": "gelu_tanh"},
    "gelu_pytorch_tanh": {"lm_head_activation": "gelu_tanh"},
    "relu": {"lm_head_activation": "relu"},
    "relu2": {"lm_head_activation": "squared_relu"},
}
"""Flags by classifier_activation, which is also the activation of the masked-LM head."""


def _read(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    for name in given.names("architectures") or []:
        if not name.endswith("ForMaskedLM"):
            given.refuse("architectures", name, "such a class is read for MaskedLM")
    biases = read_biases(given)
    biased = biases["add_mlp_bias"] or biases["add_bias_linear"]
    given.only("classifier_bias", (biased,), f"mlp_bias is {biased}, and the head is alike")
    given.only("decoder_bias", (True,), "the logits have a bias")
    same = fields["hidden_dropout"]
    given.only("mlp_dropout", (same,), f"embedding_dropout is {same}; there is one dropout")
    given.only("position_embedding_type", ("absolute", "rope"), "positions are rotary")
    given.only("rope_scaling", (None,), "its scaling is in rope_parameters, by kind of block")
    given.unused(
        "initializer_cutoff_factor", "classifier_pooling", "classifier_dropout",
        "deterministic_flash_attn", "sparse_prediction", "sparse_pred_ignore_index",
        "reference_compile", "repad_logits_with_grad", "layer_norm_eps", "cls_token_id",
        "sep_token_id",
    )  # fmt: skip
    bias_key, window_key = "norm_bias", "local_attention"
    every = given.content.get("global_attn_every_n_layers", _EVERY)
    given.unused("global_attn_every_n_layers")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        given.refuse("global_attn_every_n_layers", every, "expected a positive integer")
    kinds = [SLIDING if n % every else FULL for n in range(fields["num_layers"])]
    windows = read_windows(given, given.whole(window_key), kinds)
    wide, narrow = read_kinds(given)
    if "local_rope_theta" in given.content:
        given.number("local_rope_theta")
    local = agreed(given, ("local_rope_theta",), narrow.get("rope_theta"), _LOCAL_BASE)
    return {
        **biases,
        **given.choice("classifier_activation", _HEAD),
        **windows,
        "rotary_base": agreed(given, ("global_rope_theta",), wide.get("rope_theta"), 160_000.0),
        "rotary_base_local": None if windows["sliding_window"] is None else local,
        "rope_scaling": read_scaling(given, fields, wide),
        "normalization": "LayerNorm" if given.flag(bias_key) else "UnbiasedLayerNorm",
    }


def _write(model: ModelConfig) -> dict[str, Any]:
    rope, kinds = write_rope(model, "global_rope_theta"), layer_types(model)
    local = _LOCAL_BASE if model.attention.sliding_window is None else local_base(model)
    rope.pop("rope_scaling", None)  # transformers 5 would apply it to both kinds of blocks
    every = shortest(tuple(kind == FULL for kind in kinds), every_first)
    return {
        **write_biases(model),
        "classifier_bias": model.mlp.bias,
        "decoder_bias": True,
        "classifier_activation": ACTIVATION_NAMES[model.head_activation],
        "norm_bias": model.norm.traits.biased,
        "mlp_dropout": model.hidden_dropout,
        "local_attention": model.attention.sliding_window or _WINDOW,
        "layer_types": kinds,
        **rope,
        "local_rope_theta": local,
        "rope_parameters": by_kind(rope["rope_parameters"], local),
        # Key that transformers 4 reads instead of layer_types. It cannot express other patterns.
        **({} if isinstance(every, str) else {"global_attn_every_n_layers": every}),
        **dict.fromkeys(f"{token}_token_id" for token in ("bos", "eos", "cls", "sep")),
    }


MODERNBERT = Architecture(
    title="ModernBERT",
    model_type="modernbert",
    model_class="ModernBertForMaskedLM",
    entries=(
        *weight("embedding.word_embeddings", "model.embeddings.tok_embeddings"),
        *norm("embedding.norm", "model.embeddings.norm"),
        *block(
            "model.layers.{n}",
            [replace(each, at=lambda model, n: n) for each in norm("attention_norm", "attn_norm")],
            linear("attention.qkv", "attn.Wqkv", bias=qkv_biased),
            linear("attention.proj", "attn.Wo", bias=attention_biased),
            norm("mlp_norm", "mlp_norm"),
            linear("mlp.up", "mlp.Wi"),
            linear("mlp.down", "mlp.Wo"),
        ),
        *norm("final_norm.norm", "model.final_norm"),
        *(
            replace(each, when=lambda m: predicts(m) and m.mlp.bias)
            if each.ours == "lm_head.dense.bias" else each
            for each in lm_head("head.dense", "head.norm", "decoder")
        ),
    ),
    keys={
        **SIZES,
        "intermediate_size": "ffn_hidden_size",
        "hidden_activation": "activation",
        "attention_dropout": "attention_dropout",
        "embedding_dropout": "hidden_dropout",
        "norm_eps": "norm_epsilon",
        "initializer_range": "init_method_std",
    },
    fixed={
        "position_embedding_type": "rope", "embed_layernorm": True, "first_norm": False,
        "bert_binary_head": False,
    },
    gated=True,
    activations=GATES,
    features=frozenset(
        {"lm_head_activation", "sliding_window", "window_attn_skip_freq", "rotary_base_local",
         "rope_scaling", "add_attention_bias", "add_mlp_bias"}
    ),
    requirements=(
        DIVISIBLE,
        LOCAL_UNSCALED,
        Requirement(lambda m: not m.token_types, "--num-tokentypes 0"),
        Requirement(
            lambda m: m.norm.normalization in ("LayerNorm", "UnbiasedLayerNorm"),
            "--normalization LayerNorm or UnbiasedLayerNorm",
        ),
    ),
    read=_read,
    write=_write,
    copies=copies_of("decoder"),
    family="bert",
    task=MASKED_LM,
)  # fmt: skip
