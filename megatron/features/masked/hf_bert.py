"""BERT in Hugging Face format, and the tasks that compare its outputs. This encoder with learned
positions, LayerNorm and biases has two variants: the original, which is post-norm, and Megatron's,
which is pre-norm.

With ``--apply-residual-connection-post-layernorm``, a block in this project normalises the residual
sum at its beginning. The first block's norm is therefore the original's embedding norm, the norm of
each further block is the output norm of the block before it, and the final norm is the output norm
of the last block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.source import Source
from megatron.config import ModelConfig
from megatron.families import spec_of
from megatron.features.masked.batch import BertBatch
from megatron.features.masked.heads import LabelledBatch
from megatron.formats.features import Requirement
from megatron.formats.huggingface.architecture import Architecture, Tensors
from megatron.formats.huggingface.config_reader import ACTIVATIONS, HFConfigReader
from megatron.formats.huggingface.entries import (
    SAME,
    SEPARATE_QKV,
    TABLE,
    TWICE,
    Condition,
    Entry,
    block,
    linear,
    norm,
    untied,
    weight,
)
from megatron.formats.huggingface.layer_norm_decoders import SIZES
from megatron.formats.huggingface.tasks import Inputs, Task, compared_length
from megatron.model.layer_list import LayerState


class MaskedLM(Task):
    """Task of an encoder that predicts masked tokens and, with its binary head, whether two
    segments belong together."""

    def inputs(self, model: ModelConfig, seed: int) -> Inputs:
        """Return two samples of two segments, the second of which is padded."""
        theirs, positions_BS = _texts(model, seed, 2)
        tokens_BS, padding_mask_BS = theirs["input_ids"], theirs["attention_mask"]
        batch = BertBatch(
            tokens_BS,
            theirs["token_type_ids"],
            labels_BS=tokens_BS,
            is_random_B=torch.zeros(2, dtype=torch.int64),
            loss_mask_BS=padding_mask_BS.float(),
            padding_mask_BS=padding_mask_BS,
            positions_BP=torch.arange(tokens_BS.shape[1]).expand(2, -1),
            position_ids_BS=positions_BS,
        )
        begin = spec_of(model).begin(batch).changed(targets=None)
        return Inputs(begin, theirs, counted=padding_mask_BS.bool())

    def outputs(self, state: LayerState, model: ModelConfig) -> dict[str, Tensor]:
        logits_BSV = state.hidden[..., : model.vocabulary.size]
        if not model.bert_binary_head:
            return {"logits": logits_BSV}
        assert state.pooled is not None
        return {"prediction_logits": logits_BSV, "seq_relationship_logits": state.pooled}

    def special_tokens(self, tokenizer: Any, source: Source) -> dict[str, Any]:
        if _offset(source):
            return {"bos_token_id": tokenizer.cls_token_id, "eos_token_id": tokenizer.sep_token_id}
        tokens = {"pad_token_id": tokenizer.pad_token_id}
        if source.model.positions.position_embedding_type == "rope":  # ModernBERT
            tokens |= {
                "cls_token_id": tokenizer.cls_token_id, "sep_token_id": tokenizer.sep_token_id,
                "bos_token_id": tokenizer.cls_token_id, "eos_token_id": tokenizer.sep_token_id,
            }  # fmt: skip
        return tokens

    def end_only(self, source: Source) -> dict[str, Any]:
        return {} if _offset(source) else {"pad_token_id": None}


MASKED_LM = MaskedLM()


def _offset(source: Source) -> int:
    """Return the number of rows before the first position; the last is RoBERTa's padding row."""
    return source.model.positions.position_embedding_offset


def _texts(model: ModelConfig, seed: int, rows: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return random texts of two segments as arguments of the Hugging Face `forward`, and this
    project's position ids. Every second text is padded, and uses the last positions."""
    length, last = compared_length(model), model.positions.max_position_embeddings
    random = torch.Generator().manual_seed(seed)
    tokens_BS = torch.randint(model.vocabulary.size, (rows, length), generator=random)
    types_BS = torch.zeros_like(tokens_BS)
    if model.token_types:
        types_BS = torch.randint(model.token_types, (rows, length), generator=random)
    padding_mask_BS = torch.ones_like(tokens_BS)
    padding_mask_BS[1::2, length - length // 4 :] = 0
    positions_BS = torch.arange(length).repeat(rows, 1)
    positions_BS[1::2] += last - length
    theirs = {
        "input_ids": tokens_BS,
        "token_type_ids": types_BS,
        "attention_mask": padding_mask_BS,
        "position_ids": positions_BS + model.positions.position_embedding_offset,
    }
    return theirs, positions_BS


class LabelledTextTask(MaskedLM):
    """Task of an encoder for labelled text: classification, multiple choice or span prediction."""

    unit = "texts"

    def inputs(self, model: ModelConfig, seed: int) -> Inputs:
        """Return two texts of two segments, the second padded, or two multiple-choice questions."""
        choices = 3 if model.head == "multiple_choice" else 1
        theirs, positions_BS = _texts(model, seed, 2 * choices)
        tokens_BS, types_BS, padding_mask_BS, _ = theirs.values()
        labels_B = torch.zeros(2, dtype=torch.int64)
        batch = LabelledBatch(tokens_BS, types_BS, padding_mask_BS, labels_B, choices)
        begin = spec_of(model).begin(batch)
        if choices > 1:
            theirs = {name: values.view(2, choices, -1) for name, values in theirs.items()}
        return Inputs(begin.changed(targets=None, position_ids=positions_BS), theirs)

    def outputs(self, state: LayerState, model: ModelConfig) -> dict[str, Tensor]:
        if model.head == "span":
            start_BS, end_BS = state.hidden.unbind(-1)
            return {"start_logits": start_BS, "end_logits": end_BS}
        assert state.pooled is not None
        return {"logits": state.pooled}

    def count(self, logits: Tensor) -> int:
        return len(logits)


LABELLED_TEXT = LabelledTextTask()


_BIAS = "embedding.word_embeddings.bias"
_SECOND_HEAD = "cls.seq_relationship.weight"


def has_head(head: str) -> Condition:
    return lambda model: model.head == head


predicts = has_head("lm")


def _paired(model: ModelConfig) -> bool:
    return predicts(model) and model.bert_binary_head


def tied_head(model: ModelConfig) -> bool:
    return predicts(model) and model.embedding.tied


def untied_head(model: ModelConfig) -> bool:
    return predicts(model) and untied(model)


def dense(ours: str, theirs: str, when: Condition) -> tuple[Entry, ...]:
    return tuple(dataclasses.replace(entry, when=when) for entry in linear(ours, theirs))


def sum_norm(ours: str, first: str, theirs: str) -> tuple[Entry, ...]:
    """Return the entries of a norm that belongs to the previous block in the Hugging Face model, or
    is ``first`` for the first block."""
    return tuple(
        dataclasses.replace(entry, first=(f"{first}.{entry.ours.rpartition('.')[2]}",))
        for entry in norm(ours, theirs)
    )


def lm_head(
    transform: str, normed: str, decoder: str, bias: str | None = None
) -> tuple[Entry, ...]:
    """Return the entries of a masked-LM head: its dense layer and norm, and the weight and bias of
    the logits. ``bias`` is a second name of the logits' bias."""
    # transformers 5 reads the first name; transformers 4 derives it from the second.
    names = (f"{decoder}.bias",) if bias is None else (f"{decoder}.bias", bias)
    return (
        *dense("lm_head.dense", transform, predicts),
        *norm("lm_head.norm", normed, predicts),
        Entry(_BIAS, (bias or f"{decoder}.bias",), SAME, tied_head),
        *weight("output_layer", decoder, when=untied_head),
        Entry("output_layer.bias", names, SAME if bias is None else TWICE, untied_head),
    )


_BEFORE = (
    *weight("embedding.word_embeddings", "bert.embeddings.word_embeddings"),
    *weight("embedding.position_embeddings", "bert.embeddings.position_embeddings"),
    *weight(
        "embedding.tokentype_embeddings", "bert.embeddings.token_type_embeddings",
        lambda model: model.token_types > 0,
    ),
)  # fmt: skip
_QKV = linear(
    "attention.qkv", "attention.self.query", "attention.self.key", "attention.self.value",
    form=SEPARATE_QKV,
)  # fmt: skip
_PROJ = linear("attention.proj", "attention.output.dense")
_MLP = (*linear("mlp.up", "intermediate.dense"), *linear("mlp.down", "output.dense"))
_HEADS = (
    *dense(
        "pooler.dense", "bert.pooler.dense",
        lambda model: _paired(model) or model.head in ("classification", "multiple_choice"),
    ),
    *dense("binary_head", "cls.seq_relationship", _paired),
    *dense("classification_head", "classifier", has_head("classification")),
    *dense("multichoice_head", "classifier", has_head("multiple_choice")),
    *dense("span_head", "qa_outputs", has_head("span")),
    *lm_head(
        "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm",
        "cls.predictions.decoder", "cls.predictions.bias",
    ),
)  # fmt: skip


def copies_of(decoder: str, bias: str | None = None) -> Callable[[ModelConfig], Mapping[str, str]]:
    """Return a function that maps redundant tensors to the tensors that they repeat: the decoder
    weight to the token embedding and, with ``bias``, the decoder bias to the logits' bias."""
    copies = {f"{decoder}.weight": TABLE} | ({f"{decoder}.bias": _BIAS} if bias else {})
    return lambda model: copies if tied_head(model) else {}


def token_types(prefix: str) -> dict[str, Any]:
    """Return the fields of an architecture that detect token types and the binary head. A single
    token type embedding of zeros means that the model has no token types. The binary head may exist
    even if config.json names a class without it (as in the published bert-base-uncased)."""
    name = f"{prefix}.embeddings.token_type_embeddings.weight"

    def seen(content: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
        typed = name not in tensors
        if not typed:
            types_TH = tensors.tensor(name)
            typed = types_TH.ndim != 2 or types_TH.shape[0] != 1 or bool(types_TH.any())
        return content | {"_second_head": _SECOND_HEAD in tensors, "_token_types": typed}

    return {
        "seen": seen,
        "constants": lambda m: {} if m.token_types else {name: torch.zeros(1, m.hidden_size)},
    }


def read_bert(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    given.only("position_embedding_type", ("absolute", None), "positions must be learned")
    given.only("is_decoder", (False,), "a decoder that BERT has become cannot be represented")
    given.only("add_cross_attention", (False,), "cross-attention cannot be represented")
    # Keys of Google's multilingual models, for the pooler of other tasks.
    given.unused(
        "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
        "pooler_size_per_head", "pooler_type", "type_vocab_size", "_second_head",
        "_token_types",
    )  # fmt: skip
    classes = given.names("architectures") or []
    types = given.whole("type_vocab_size") if given.content.get("_token_types", True) else 0
    head = read_labels(given, fields, classes)
    if head:
        second = types > 1  # has no effect with a head for labelled text
    else:
        second = given.content.get("_second_head", any("PreTraining" in name for name in classes))
    usual = 2 if second else 0
    return {"bert_binary_head": second, "num_tokentypes": None if types == usual else types} | head


def read_labels(
    given: HFConfigReader, fields: dict[str, Any], classes: Sequence[str]
) -> dict[str, Any]:
    """Return the flags of a head for labelled text, or an empty dictionary if the model has
    none."""
    tasks = {name.rpartition("For")[2] for name in classes}
    if tasks & {"TokenClassification", "NextSentencePrediction"}:
        given.refuse("architectures", classes, "its head cannot be represented")
    if not tasks & _TASKS.keys():
        return {}
    if len(tasks) > 1:
        given.refuse("architectures", classes, "they have different heads")
    given.only(
        "classifier_dropout",
        (None, fields["hidden_dropout"]),
        "the dropout before the head is that of the blocks, hidden_dropout_prob",
    )
    head = _TASKS[tasks.pop()]
    if head != "classification":
        return {"head": head}
    names = given.table("id2label")
    labels = len(names) or given.optional_whole("num_labels") or 2
    kinds = (None, "regression") if labels == 1 else (None, "single_label_classification")
    given.only("problem_type", kinds, f"a head with {labels} labels has one for each text")
    if names and names.keys() != set(map(str, range(labels))):
        given.refuse("id2label", names, "expected the numbers from 0 as names of labels")
    shown = tuple(str(names.get(str(label))) for label in range(labels))
    usual = shown == _unnamed(labels) or not names
    return {"head": head, "num_labels": labels, "label_names": () if usual else shown}


def _unnamed(labels: int) -> tuple[str, ...]:
    """Default label names in `transformers`."""
    return tuple(f"LABEL_{label}" for label in range(labels))


def write_labels(model: ModelConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {"type_vocab_size": max(model.token_types, 1)}
    if model.num_labels is None:
        return fields
    names = model.label_names or _unnamed(model.num_labels)
    return fields | {
        "id2label": {str(label): name for label, name in enumerate(names)},
        "label2id": {name: label for label, name in enumerate(names)},
        "problem_type": "regression" if model.num_labels == 1 else "single_label_classification",
    }


def _nearest(model: ModelConfig) -> tuple[ModelConfig, str]:
    """Return the closest model that the format can express, and the reason for the difference.
    Megatron's head computes exact GELU, regardless of the MLP's activation."""
    head, inner = model.head_activation, model.mlp.activation
    if not predicts(model) or head == inner or not {head, inner} <= {"gelu_erf", "gelu_tanh"}:
        return model, ""
    why = (
        f"hidden_act is the activation of MLP and output head, and here they differ: {inner} is "
        f"written for both, and --lm-head-activation {inner} trains such a model"
    )
    return dataclasses.replace(model, lm_head_activation=inner), why


def _one_activation(model: ModelConfig) -> bool:
    near, _ = _nearest(model)
    return not predicts(model) or near.head_activation == near.mlp.activation


_TASKS = {
    "SequenceClassification": "classification",
    "MultipleChoice": "multiple_choice",
    "QuestionAnswering": "span",
}
"""Heads by the task suffix of the class name in `transformers`."""


def class_named(prefix: str, model: ModelConfig) -> str:
    pretrained = "PreTraining" if model.bert_binary_head else "MaskedLM"
    heads = {head: task for task, head in _TASKS.items()}
    return f"{prefix}For{heads.get(model.head, pretrained)}"


def _old(model: ModelConfig) -> frozenset[str]:
    """Return the names of pooler weights that old files have although the model has no pooler."""
    names = ("bert.pooler.dense.weight", "bert.pooler.dense.bias")
    return frozenset(names) if model.head == "span" else frozenset()


def _bert(
    title: str, model_type: str, prefix: str, post_norm: bool, *entries: Entry
) -> Architecture:
    return Architecture(
        title=title,
        model_type=model_type,
        model_class=lambda model: class_named(prefix, model),
        entries=(*_BEFORE, *entries, *_HEADS),
        keys={
            **SIZES,
            "intermediate_size": "ffn_hidden_size",
            "hidden_act": "activation",
            "attention_probs_dropout_prob": "attention_dropout",
            "hidden_dropout_prob": "hidden_dropout",
            "layer_norm_eps": "norm_epsilon",
            "initializer_range": "init_method_std",
        },
        fixed={
            "position_embedding_type": "learned_absolute",
            "normalization": "LayerNorm",
            "add_bias_linear": True,
            "apply_residual_connection_post_layernorm": post_norm,
        },
        write=write_labels,
        read=read_bert,
        activations={
            name: flags | _HEAD_ACTIVATIONS.get(name, {"openai_gelu": True})
            for name, flags in ACTIVATIONS.items()
        },
        base_prefix="bert.",
        endings={
            "LayerNorm.weight": "LayerNorm.gamma",
            "LayerNorm.bias": "LayerNorm.beta",
            "cls.predictions.bias": "cls.predictions.decoder.bias",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
        ignored=_old,
        features=frozenset({"num_tokentypes", "lm_head_activation", "head"}),
        requirements=(
            Requirement(_one_activation, "--lm-head-activation with the activation of the MLP"),
        ),
        nearest=_nearest,
        copies=copies_of("cls.predictions.decoder", "cls.predictions.bias"),
        **token_types("bert"),
        family="bert",
        task=lambda model: MASKED_LM if model.head == "lm" else LABELLED_TEXT,
    )


_HEAD_ACTIVATIONS: dict[str, dict[str, Any]] = {
    "gelu": {},
    "gelu_python": {},
    "relu": {"lm_head_activation": "relu"},
    "relu2": {"lm_head_activation": "squared_relu"},
}
"""Flags that give the masked-LM head the activation of the MLP, by its Hugging Face name. Other
names get the tanh approximation of GELU."""

BERT = _bert(
    "BERT", "bert", "Bert", True,
    *block(
        "bert.encoder.layer.{n}",
        _QKV,
        _PROJ,
        norm("mlp_norm", "attention.output.LayerNorm"),
        _MLP,
    ),
    *block(
        "bert",
        sum_norm(
            "attention_norm", "bert.embeddings.LayerNorm", "encoder.layer.{before}.output.LayerNorm"
        ),
    ),
    *norm("final_norm.norm", "bert.encoder.layer.{last}.output.LayerNorm"),
)  # fmt: skip
MEGATRON_BERT = _bert(
    "MegatronBERT", "megatron-bert", "MegatronBert", False,
    *block(
        "bert.encoder.layer.{n}",
        norm("attention_norm", "attention.ln"),
        _QKV,
        _PROJ,
        norm("mlp_norm", "ln"),
        _MLP,
    ),
    *norm("final_norm.norm", "bert.encoder.ln"),
)  # fmt: skip
