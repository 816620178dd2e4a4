"""Megatron's arguments, saved in its checkpoints as a namespace, and our configuration.

Most arguments mean the same as a flag, whose ``option(megatron=...)`` says so; the others are here.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import resolved
from megatron.config import ModelConfig, ModelFlags
from megatron.config.flags import value_type
from megatron.config.positions import llama3_scaling
from megatron.formats.features import FEATURES, features_of, without
from megatron.formats.legacy_megatron.names import FAMILIES, names_of_family

_REFUSED: dict[str, tuple[Any, ...]] = {
    "num_experts": (None, 0, 1, [1], (1,)),
    "rotary_interleaved": (False,),
    "multi_latent_attention": (False,),
    "retro_add_retriever": (False,),
    "glu_activation": (None,),
    "window_size": (None,),
    "mtp_num_layers": (None, 0),
    "mos": (False,),
}
"""Arguments that change the network in a way that cannot be represented, and harmless values."""

_FEATURES = {
    "num_query_groups", "kv_channels", "add_qkv_bias", "rotary_percent", "rope_scaling",
    "apply_layernorm_1p", "apply_residual_connection_post_layernorm", "num_tokentypes",
}  # fmt: skip
"""Features that are written."""

_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}

_ACTIVATIONS = ("gelu_tanh", "gelu_erf", "swiglu", "squared_relu")

_POSITIONS = ("learned_absolute", "rope", "alibi", "none")


def _same() -> Iterator[tuple[str, type, tuple[str, ...]]]:
    """Fields of :class:`ModelFlags` with an argument that means the same: field, type, and names of
    the argument, of which the first is written."""
    hints = typing.get_type_hints(ModelFlags)
    for field in dataclasses.fields(ModelFlags):
        if names := field.metadata["megatron"]:
            names = (field.name,) if names is True else names
            yield field.name, value_type(hints[field.name]), names


def model_of_arguments(
    arguments: Mapping[str, Any], where: Path, family: str = ModelConfig.family
) -> ModelConfig:
    """The network that the arguments in a file describe, without the size of its vocabulary. Raises
    CheckpointError if an argument is missing, malformed, or cannot be represented."""
    for name, harmless in _REFUSED.items():
        value = arguments.get(name, harmless[0])
        if value not in harmless:
            raise CheckpointError(
                f"{where}: the network has {name} {value!r}, which cannot be represented"
            )
    values: dict[str, Any] = {}
    for field, kind, names in _same():
        found = [arguments[name] for name in names if arguments.get(name) is not None]
        if found:
            values[field] = _checked(found[0], kind, names[0], where)
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if values.get(name, 0) < 1:
            raise CheckpointError(f"{where}: the argument {name} is missing or not positive")
    if "normalization" in values:
        norm = values["normalization"]
        if norm.lower() not in _NORMS:
            raise CheckpointError(
                f"{where}: normalization {norm!r}: expected one of {', '.join(_NORMS.values())}"
            )
        values["normalization"] = _NORMS[norm.lower()]
    values["position_embedding_type"] = _positions(arguments, where)
    scaling = _rope_scaling(arguments, where)
    values["rope_scaling"] = scaling if values["position_embedding_type"] == "rope" else None
    # Megatron-DeepSpeed's name; Megatron-LM's, which can have a value without effect.
    groups = arguments.get("num_key_value_heads")
    if groups is None and arguments.get("group_query_attention"):
        groups = arguments.get("num_query_groups")
    heads = values["num_attention_heads"]
    groups = heads if groups is None else _checked(groups, int, "num_query_groups", where)
    if groups < 1 or heads % groups:
        raise CheckpointError(f"{where}: {groups} key and value heads do not divide {heads} heads")
    values["num_query_groups"] = groups
    if values.get("swiglu") or values.get("squared_relu"):
        values.pop("bias_gelu_fusion", None)  # concerns another activation
    fixed = names_of_family(family).flags
    return complete(ModelFlags(family=family, **fixed, **values), where)


def complete(flags: ModelFlags, where: Path) -> ModelConfig:
    """The network, with the values that Megatron derives differently than we do. Raises
    CheckpointError if the heads do not fit the width or each other."""
    assert flags.hidden_size
    completed = dataclasses.replace(
        flags,
        ffn_hidden_size=flags.ffn_hidden_size or 4 * flags.hidden_size,
        seq_length=flags.seq_length or flags.max_position_embeddings,
    )
    return resolved(completed, where)


def arguments_of_model(model: ModelConfig) -> dict[str, Any]:
    """Inverse of :func:`model_of_arguments`. Raises ValueError if Megatron has no such network; the
    message names the flags."""
    positions, attention, scaling = model.positions, model.attention, model.positions.rope_scaling
    kind, activation = positions.position_embedding_type, model.mlp.activation
    linear, llama3 = scaling.rope_type == "linear", scaling.rope_type == "llama3"
    usual = scaling.is_default or linear or (
        scaling.factor is not None and scaling == llama3_scaling(scaling.factor)
    )  # fmt: skip
    families = [known.family for known in FAMILIES]
    conditions = {
        f"--model-family {' or '.join(families)}": model.family in families,
        "--position-embedding-type learned_absolute or rope": kind in ("learned_absolute", "rope"),
        "no --rope-scaling other than linear and that of --use-rope-scaling": usual,
        f"GELU, --swiglu or --squared-relu (not {activation})": activation in _ACTIVATIONS,
        f"--normalization {' or '.join(_NORMS.values())}": (
            model.norm.normalization in _NORMS.values()
        ),
    }
    wanted = [flag for flag, fits in conditions.items() if not fits]
    written_too: set[str] = set()
    if model.family in families:
        names = names_of_family(model.family)
        if model.encoder_decoder != names.flags.get("encoder_decoder", False):
            wanted.append("a decoder behind an encoder in the families that have one, and no other")
        wanted += [need.wanted for need in names.requirements if not need.holds(model)]
        written_too = {"head"} if names.heads else set()
    surplus = features_of(model) - _FEATURES - written_too
    wanted += [without(feature) for feature in FEATURES if feature in surplus]
    if wanted:
        raise ValueError(f"Megatron's old layout requires {', '.join(wanted)}")
    flags = model.flags()
    written = {names[0]: getattr(flags, field) for field, _, names in _same()}
    return written | {
        "norm_epsilon": model.norm.norm_epsilon,
        "encoder_num_layers": model.num_layers,
        "encoder_seq_length": model.seq_length,
        "position_embedding_type": kind,
        "add_position_embedding": kind != "rope",
        "use_rotary_position_embeddings": kind == "rope",
        "use_rope_scaling": llama3,
        "rope_scaling_factor": scaling.factor if llama3 else 8.0,
        "rotary_seq_len_interpolation_factor": scaling.factor if linear else None,
        "group_query_attention": attention.num_query_groups != attention.num_attention_heads,
        "num_query_groups": attention.num_query_groups,
        "unpadded_vocab_size": model.vocabulary.size,
        # A fused activation is GELU by tanh, whatever the other arguments are.
        "bias_gelu_fusion": activation == "gelu_tanh",
    }


def divided_sizes(model: ModelConfig) -> dict[str, int]:
    """Sizes that tensor-parallel ranks divide among them, by name of the argument."""
    return {
        "num_attention_heads": model.attention.num_attention_heads,
        "num_query_groups": model.attention.num_query_groups,
        "ffn_hidden_size": model.mlp.ffn_hidden_size,
    }


def _checked(value: Any, kind: type, name: str, where: Path) -> Any:
    """A value of the type that an argument has."""
    fits = isinstance(value, bool) == (kind is bool) and (
        isinstance(value, kind) or (kind is float and isinstance(value, int))
    )
    if not fits:
        raise CheckpointError(
            f"{where}: the argument {name} is {value!r}; expected a value of type {kind.__name__}"
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
            f"{where}: position_embedding_type {kind!r}: expected one of {', '.join(_POSITIONS)}"
        )
    return kind


def _rope_scaling(arguments: Mapping[str, Any], where: Path) -> str | None:
    def number(name: str) -> float | None:
        value = arguments.get(name)
        return None if value is None else _checked(value, float, name, where)

    factor = number("rotary_seq_len_interpolation_factor")
    if factor is not None:
        return json.dumps({"rope_type": "linear", "factor": factor})
    if not arguments.get("use_rope_scaling"):
        return None
    factor = number("rope_scaling_factor")
    return llama3_scaling(8.0 if factor is None else factor).to_json()
