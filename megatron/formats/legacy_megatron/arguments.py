"""Megatron's arguments, saved in its checkpoints as a namespace, and our configuration."""

from __future__ import annotations

import argparse
import dataclasses
import json
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import resolved
from megatron.config import ModelConfig, ModelFlags, TokenizerConfig
from megatron.config.flags import value_type
from megatron.config.positions import llama3_scaling


def _rows() -> Iterator[tuple[str, type, tuple[str, ...]]]:
    """Fields of :class:`ModelFlags` with an argument that says the same: field, type of its value,
    names of the argument, of which the first is written.

    Positions and key and value heads are more than a copy.
    """
    hints = typing.get_type_hints(ModelFlags)
    for field in dataclasses.fields(ModelFlags):
        if names := field.metadata["megatron"]:
            names = (field.name,) if names is True else names
            yield field.name, value_type(hints[field.name]), names


_REFUSED: dict[str, tuple[Any, ...]] = {
    "num_experts": (None, 0, 1, [1], (1,)),
    "apply_residual_connection_post_layernorm": (False,),
    "rotary_interleaved": (False,),
    "multi_latent_attention": (False,),
    "retro_add_retriever": (False,),
    "glu_activation": (None,),
    "window_size": (None,),
    "mtp_num_layers": (None, 0),
    "mos": (False,),
}
"""Arguments that change the network in a way that is not ours, and their harmless values."""

_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}

_POSITIONS = ("learned_absolute", "rope", "alibi", "none")

VOCABULARIES = {
    "GPT2BPETokenizer": 50257,
    "BertWordPieceLowerCase": 30522,
    "BertWordPieceCase": 28996,
}
"""Sizes of the vocabularies that Megatron's tokenizers always have."""

_PUBLISHED = {50304: 50257, 30592: 30522, 29056: 28996}
"""Rows of the token tables of NVIDIA's published models, which carry no arguments, and how many of
them are tokens: those of GPT-2, and of BERT without and with case, padded to multiples of 128."""


def model_of_arguments(arguments: Mapping[str, Any], where: Path) -> ModelConfig:
    """The network that the arguments describe; the size of its vocabulary is not among them.

    Args:
        arguments: the saved namespace as a dictionary.
        where: the file, for messages.

    Raises:
        CheckpointError: an argument is missing, malformed, or describes what is not ours.
    """
    for name, harmless in _REFUSED.items():
        value = arguments.get(name, harmless[0])
        if value not in harmless:
            raise CheckpointError(
                f"{where}: the network has {name} {value!r}, which there is no counterpart of here"
            )
    values: dict[str, Any] = {}
    for field, kind, names in _rows():
        found = [arguments[name] for name in names if arguments.get(name) is not None]
        if found:
            values[field] = _checked(found[0], kind, names[0], where)
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if values.get(name, 0) < 1:
            raise CheckpointError(f"{where}: the argument {name} is missing or not positive")
    if "normalization" in values:
        norm = values["normalization"]
        if norm.lower() not in _NORMS:
            raise CheckpointError(f"{where}: normalization {norm!r} is neither of {_NORMS}")
        values["normalization"] = _NORMS[norm.lower()]
    values["position_embedding_type"] = _positions(arguments, where)
    scaling = _rope_scaling(arguments, where)
    values["rope_scaling"] = scaling if values["position_embedding_type"] == "rope" else None
    values["num_query_groups"] = _key_value_heads(arguments, values, where)
    if values.get("swiglu") or values.get("squared_relu"):
        values.pop("bias_gelu_fusion", None)  # about an activation that is not there
    return complete(ModelFlags(**values), where)


def complete(flags: ModelFlags, where: Path) -> ModelConfig:
    """The network, with what Megatron derives in other ways than we do.

    Raises:
        CheckpointError: the heads do not fit the width or each other.
    """
    hidden, heads = flags.hidden_size, flags.num_attention_heads
    assert hidden and heads
    groups = flags.num_query_groups or heads
    if heads % groups:
        raise CheckpointError(f"{where}: {groups} key and value heads, {heads} query heads")
    if flags.kv_channels is None and hidden % heads:
        raise CheckpointError(f"{where}: {heads} heads do not divide the width {hidden}")
    completed = dataclasses.replace(
        flags,
        ffn_hidden_size=flags.ffn_hidden_size or 4 * hidden,
        seq_length=flags.seq_length or flags.max_position_embeddings,
    )
    return resolved(completed, where)


def arguments_of_model(model: ModelConfig) -> dict[str, Any]:
    """Inverse of :func:`model_of_arguments`.

    Raises:
        ValueError: Megatron has no such network; the message names the flags.
    """
    misfits = [flag for flag, fits in _requirements(model).items() if not fits]
    if misfits:
        raise ValueError(f"Megatron's old layout has no {', '.join(misfits)}")
    flags = model.flags()
    written = {names[0]: getattr(flags, field) for field, _, names in _rows()}
    rope = model.positions.position_embedding_type == "rope"
    scaling = model.positions.rope_scaling
    linear, llama3 = scaling.rope_type == "linear", scaling.rope_type == "llama3"
    return written | {
        "norm_epsilon": model.norm.norm_epsilon,
        "encoder_num_layers": model.num_layers,
        "encoder_seq_length": model.seq_length,
        "position_embedding_type": model.positions.position_embedding_type,
        "add_position_embedding": not rope,
        "use_rotary_position_embeddings": rope,
        "use_rope_scaling": llama3,
        "rope_scaling_factor": scaling.factor if llama3 else 8.0,
        "rotary_seq_len_interpolation_factor": scaling.factor if linear else None,
        "group_query_attention": model.attention.num_query_groups
        != model.attention.num_attention_heads,
        "num_query_groups": model.attention.num_query_groups,
        "unpadded_vocab_size": model.vocabulary.size,
        # A fused activation is GELU by tanh, whatever else is said.
        "bias_gelu_fusion": model.mlp.activation == "gelu_tanh",
    }


def _requirements(model: ModelConfig) -> dict[str, bool]:
    """Flags, and whether the model does without them."""
    scaling = model.positions.rope_scaling
    llama3 = scaling.factor is not None and scaling == llama3_scaling(scaling.factor)
    return {
        f"--model-family {model.family}": model.family == ModelConfig.family,
        "--position-embedding-type other than learned_absolute and rope": (
            model.positions.position_embedding_type in ("learned_absolute", "rope")
        ),
        "--position-embedding-offset": not model.positions.position_embedding_offset,
        "--rope-scaling other than linear and that of --use-rope-scaling": (
            llama3 or scaling.rope_type in ("default", "linear")
        ),
        "--rotary-base-local": model.positions.rotary_base_local is None,
        "--sliding-window": model.attention.sliding_window is None,
        "--query-pre-attn-scalar": model.attention.query_pre_attn_scalar
        == model.attention.kv_channels,
        "--attn-logit-softcapping": model.attention.attn_logit_softcapping is None,
        "--final-logit-softcapping": model.embedding.final_logit_softcapping is None,
        "--add-attention-bias": model.attention.proj_bias == model.mlp.bias,
        "--qk-layernorm": not model.norm.qk_layernorm,
        "--embed-layernorm": not model.norm.embed_layernorm,
        "--scale-embeddings": not model.embedding.scale_embeddings,
        "--post-norm": not model.norm.post_norm,
        "--parallel-residual": not model.parallel_residual,
        "--glu-activation geglu": model.mlp.activation != "geglu",
        "--relu": model.mlp.activation != "relu",
    }


def divided_sizes(model: ModelConfig) -> dict[str, int]:
    """What tensor-parallel ranks share, by name of the argument."""
    return {
        "num_attention_heads": model.attention.num_attention_heads,
        "num_query_groups": model.attention.num_query_groups,
        "ffn_hidden_size": model.mlp.ffn_hidden_size,
    }


def tokenizer_of_arguments(arguments: Mapping[str, Any]) -> TokenizerConfig | None:
    """How the arguments name the tokenizer and its files; None when they do not."""
    kind = arguments.get("tokenizer_type")
    if not isinstance(kind, str):
        return None
    files = {
        name: arguments[name]
        for name in (
            *("vocab_file", "merge_file", "tokenizer_model", "tokenizer_model_type"),
            "tiktoken_pattern",
        )
        if isinstance(arguments.get(name), str)
    }
    if kind == "PretrainedFromHF":
        kind, folder = "HFTokenizer", arguments.get("tokenizer_name_or_path")
        files["tokenizer_model"] = folder if isinstance(folder, str) else None
    size = arguments.get("vocab_size")
    extra = arguments.get("vocab_extra_ids")
    return TokenizerConfig(
        tokenizer_type=kind,
        vocab_size=size if kind == "NullTokenizer" and isinstance(size, int) else None,
        vocab_extra_ids=extra if isinstance(extra, int) else 0,
        **files,
    )


def unpadded_vocabulary(arguments: Mapping[str, Any], rows: int) -> int | None:
    """How many rows of the token table are tokens, the rest being padding.

    Args:
        arguments: the saved arguments; empty where the checkpoint has none.
        rows: of the table.

    Returns:
        None when the checkpoint does not say.
    """
    if not arguments:
        return _PUBLISHED.get(rows)
    known = arguments.get("unpadded_vocab_size")
    if known is None:
        kind, size = arguments.get("tokenizer_type"), arguments.get("vocab_size")
        extra = arguments.get("vocab_extra_ids") or 0
        if kind == "NullTokenizer" and isinstance(size, int):
            known = size + 1
        elif isinstance(kind, str) and kind in VOCABULARIES and isinstance(extra, int):
            known = VOCABULARIES[kind] + extra
    return known if isinstance(known, int) and 0 < known <= rows else None


def namespace(values: Mapping[str, Any]) -> argparse.Namespace:
    """What Megatron saves."""
    return argparse.Namespace(**values)


def _checked(value: Any, kind: type, name: str, where: Path) -> Any:
    """A value of the type that an argument has."""
    fits = isinstance(value, bool) == (kind is bool) and (
        isinstance(value, kind) or (kind is float and isinstance(value, int))
    )
    if not fits:
        raise CheckpointError(
            f"{where}: the argument {name} is {value!r}, where {kind.__name__} belongs"
        )
    return kind(value)


def _positions(arguments: Mapping[str, Any], where: Path) -> str:
    kind = arguments.get("position_embedding_type")
    if arguments.get("use_rotary_position_embeddings"):
        return "rope"
    if kind is None:
        return "learned_absolute" if arguments.get("add_position_embedding", True) else "none"
    if kind not in _POSITIONS:
        raise CheckpointError(
            f"{where}: position_embedding_type {kind!r} is none of {', '.join(_POSITIONS)}"
        )
    return kind


def _rope_scaling(arguments: Mapping[str, Any], where: Path) -> str | None:
    def number(name: str, default: float | None) -> float | None:
        value = arguments.get(name)
        return default if value is None else _checked(value, float, name, where)

    factor = number("rotary_seq_len_interpolation_factor", None)
    if factor is not None:
        return json.dumps({"rope_type": "linear", "factor": factor})
    if arguments.get("use_rope_scaling"):
        stretched = number("rope_scaling_factor", 8.0)
        assert stretched is not None
        return llama3_scaling(stretched).to_json()
    return None


def _key_value_heads(
    arguments: Mapping[str, Any], values: Mapping[str, Any], where: Path
) -> int | None:
    """Megatron-DeepSpeed's ``num_key_value_heads``; Megatron-LM's ``num_query_groups``, which has
    a value also when it has no effect."""
    groups = arguments.get("num_key_value_heads")
    if groups is None and arguments.get("group_query_attention"):
        groups = arguments.get("num_query_groups")
    if groups is None:
        return values["num_attention_heads"]
    groups = _checked(groups, int, "num_query_groups", where)
    if groups < 1 or values["num_attention_heads"] % groups:
        raise CheckpointError(f"{where}: {groups} key and value heads cannot be shared evenly")
    return groups
