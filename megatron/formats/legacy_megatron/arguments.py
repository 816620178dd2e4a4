"""Conversion between our configuration and Megatron's arguments, which its checkpoints store as a
namespace.

Most arguments correspond to a flag that declares ``option(megatron=...)``. The others are in this
file.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import Source, resolved
from megatron.config import ModelConfig, ModelFlags, TokenizerConfig
from megatron.config.flags import value_type
from megatron.config.positions import llama3_scaling
from megatron.formats.features import FEATURES, SavedArguments, buffers_of, features_of, without
from megatron.formats.legacy_megatron.experts import (
    EXPERT_ARGUMENTS,
    arguments_of_experts,
    experts_of_arguments,
)
from megatron.formats.legacy_megatron.names import FAMILIES, names_of_family
from megatron.formats.legacy_megatron.rank_files import MOMENTS
from megatron.parallel.shard import Shard
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.registry import TOKENIZERS

_HARMLESS: dict[str, tuple[Any, ...]] = {
    "moe_num_experts": (1,),
    "softmax_type": ("vanilla",),
    "mask_type": ("random", "row"),
    "rope_type": ("rope",),
    "rotary_scaling_factor": (1, 40),
    "spec": (["local"],),
    "embedding_multiplier": (1,),
}
_NETWORK = {
    name: _HARMLESS.get(name, ())
    for name in (
        "moe_num_experts multi_latent_attention retro_add_retriever "
        "glu_activation quick_gelu mtp_num_layers mos softmax_type qk_l2_norm "
        "attention_output_gate mask_type "
        "head_wise_attn_gate no_rope_freq rope_type mrope_section rotary_base_per_layer "
        "rotary_scaling_factor spec heterogeneous_layers_config_path "
        "heterogeneous_layers_config_encoded_json is_hybrid_model hybrid_attention_ratio "
        "hybrid_mlp_ratio hybrid_override_pattern hybrid_layer_pattern "
        "experimental_attention_variant use_mup embedding_multiplier parallel_attn scale_embeddings"
    ).split()
}
"""Arguments that change the network in an unsupported way, each with the values that are harmless
although they are not those of an unset flag."""

_FEATURES = {
    "num_query_groups", "kv_channels", "add_qkv_bias", "rotary_percent", "rope_scaling",
    "rotary_interleaved",
    "apply_layernorm_1p", "apply_residual_connection_post_layernorm", "num_tokentypes",
    "glu_linear_offset", "activation_func_clamp_value", "layer_experts",
}  # fmt: skip
"""Features of a model that Megatron's arguments can express."""
_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
_ACTIVATIONS = ("gelu_tanh", "gelu_erf", "swiglu", "quick_geglu", "squared_relu")
_POSITIONS = ("learned_absolute", "rope", "alibi", "none")


def _same() -> Iterator[tuple[str, type, tuple[str, ...]]]:
    """Yield (field, type, argument names) for each field of :class:`ModelFlags` to which an
    argument corresponds exactly. The first name is the one to write."""
    hints = typing.get_type_hints(ModelFlags)
    for field in dataclasses.fields(ModelFlags):
        if (names := field.metadata["megatron"]) and field.name not in EXPERT_ARGUMENTS:
            names = (field.name,) if names is True else names
            yield field.name, value_type(hints[field.name]), names


def model_of_arguments(
    arguments: Mapping[str, Any], where: Path, family: str = ModelConfig.family
) -> ModelConfig:
    """Return the network that a file's arguments describe, without its vocabulary size. Raises
    CheckpointError if an argument is missing, malformed, unknown, or cannot be represented."""
    values: dict[str, Any] = {}
    arguments = SavedArguments(arguments)
    arguments.refuse(where, _NETWORK)
    if "use_mup" in arguments:
        arguments.unused(*(name for name in arguments if name.startswith("mup_")))
    for field, kind, names in _same():
        if (value := _one_value(arguments, field, kind, names, where)) is not None:
            values[field] = value
    values |= experts_of_arguments(arguments, where)
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if values.get(name, 0) < 1:
            raise CheckpointError(f"{where}: the argument {name} is missing or not positive")
    if (norm := values.get("normalization")) is not None:
        if norm.lower() not in _NORMS:
            raise CheckpointError(
                f"{where}: normalization {norm!r}: expected one of {', '.join(_NORMS.values())}"
            )
        values["normalization"] = _NORMS[norm.lower()]
    values["position_embedding_type"] = _positions(arguments, where)
    scaling = _rope_scaling(arguments, where)
    values["rope_scaling"] = scaling if values["position_embedding_type"] == "rope" else None
    values["num_query_groups"] = _groups(arguments, values["num_attention_heads"], where)
    values |= _window(arguments, where)
    if (scale := _number(arguments, "softmax_scale", where)) is not None:
        if scale <= 0:
            raise CheckpointError(f"{where}: softmax_scale is {scale}, expected a positive number")
        values["query_pre_attn_scalar"] = scale**-2
    if any(map(values.get, ("swiglu", "quick_geglu", "squared_relu"))):
        values.pop("bias_gelu_fusion", None)  # it has an effect only with tanh-approximated GELU
    arguments.refuse_the_rest(where)
    fixed = names_of_family(family).flags
    return complete(ModelFlags(family=family, **fixed, **values), where)


def complete(flags: ModelFlags, where: Path) -> ModelConfig:
    """Return the network that ``flags`` describe, with Megatron's defaults where ours differ.
    Raises CheckpointError if the numbers of heads do not fit the hidden size or each other."""
    assert flags.hidden_size
    inner = flags.ffn_hidden_size or 4 * flags.hidden_size
    length = flags.seq_length or flags.max_position_embeddings
    return resolved(dataclasses.replace(flags, ffn_hidden_size=inner, seq_length=length), where)


def arguments_of_model(
    model: ModelConfig,
    experts: Callable[[ModelConfig], dict[str, Any]] = arguments_of_experts,
) -> dict[str, Any]:
    """Return Megatron's arguments for a model: the inverse of :func:`model_of_arguments`.
    ``experts`` returns the arguments for experts. Raises ValueError if Megatron has no such
    network. The message names the flags."""
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
        f"GELU, --swiglu, --quick-geglu or --squared-relu (not {activation})": activation
        in _ACTIVATIONS,
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
        raise ValueError(f"a checkpoint of Megatron requires {', '.join(wanted)}")
    flags = model.flags()
    written = {names[0]: getattr(flags, field) for field, _, names in _same()}
    written |= experts(model)
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
        # Megatron's fused activation is always the tanh approximation of GELU.
        "bias_gelu_fusion": activation == "gelu_tanh",
    }


def divided_sizes(model: ModelConfig) -> dict[str, int]:
    """Return the sizes that the tensor-parallel size must divide, by argument name."""
    return {
        "num_attention_heads": model.attention.num_attention_heads,
        "num_query_groups": model.attention.num_query_groups,
        "ffn_hidden_size": model.mlp.ffn_hidden_size,
    }


def _checked(value: Any, kind: type, name: str, where: Path) -> Any:
    """Return an argument's value as ``kind``. Raises CheckpointError if it has another type."""
    fits = isinstance(value, bool) == (kind is bool) and (
        isinstance(value, kind) or (kind is float and isinstance(value, int))
    )
    if not fits:
        raise CheckpointError(
            f"{where}: the argument {name} is {value!r}; expected a value of type {kind.__name__}"
        )
    return kind(value)


def _one_value(
    arguments: Mapping[str, Any], field: str, kind: type, names: tuple[str, ...], where: Path
) -> Any:
    """Return the value of an argument that has several names, or None if none is set. If two names
    have different values and one is the default, the other counts, because a program with both
    arguments reads only its own. Raises CheckpointError for any other difference."""
    values = {
        name: _checked(arguments[name], kind, name, where)
        for name in reversed(names)
        if arguments.get(name) is not None
    }
    if not values:
        return None
    (first, value), *others = values.items()
    for other, another in others:
        if another not in (value, getattr(ModelFlags, field)):
            raise CheckpointError(
                f"{where}: {first} is {value!r} and {other} is {another!r}; they mean the same, "
                "and which of them had an effect is not known"
            )
    return value


def _number(arguments: Mapping[str, Any], name: str, where: Path) -> float | None:
    value = arguments.get(name)
    return None if value is None else _checked(value, float, name, where)


def _groups(arguments: Mapping[str, Any], heads: int, where: Path) -> int:
    """Return the number of key and value heads. Its argument differs between Megatron-DeepSpeed and
    Megatron-LM, and Megatron-LM's may be set without having an effect."""
    groups, others = arguments.get("num_key_value_heads"), arguments.get("num_query_groups")
    if arguments.get("group_query_attention"):
        if groups not in (None, heads, others):
            raise CheckpointError(
                f"{where}: num_key_value_heads is {groups!r} and num_query_groups is {others!r}; "
                "they mean the same"
            )
        groups = others
    groups = heads if groups is None else _checked(groups, int, "num_query_groups", where)
    if groups < 1 or heads % groups:
        raise CheckpointError(f"{where}: {groups} key and value heads do not divide {heads} heads")
    return groups


def _window(arguments: Mapping[str, Any], where: Path) -> dict[str, int | str]:
    """Return the fields for sliding windows. Megatron's (N, 0) means N tokens before the query."""
    window, skipped = arguments.get("window_size"), arguments.get("window_attn_skip_freq")
    match window:
        case None | (-1, -1 | 0):
            return {}
        case (int(before), -1 | 0) if before >= 0:
            fields: dict[str, int | str] = {"sliding_window": before + 1}
        case _:
            raise CheckpointError(
                f"{where}: window_size is {window!r}, expected (N, 0) for N tokens before each"
            )
    if skipped is not None:
        name = "window_attn_skip_freq"
        listed = isinstance(skipped, list | tuple)
        fields[name] = f"{[*skipped]}" if listed else _checked(skipped, int, name, where)
    return fields


def _positions(arguments: Mapping[str, Any], where: Path) -> str:
    kind = arguments.get("position_embedding_type")
    learned = arguments.get("add_position_embedding")
    if arguments.get("use_rotary_position_embeddings"):
        return "rope"
    if kind is None:
        return "learned_absolute" if learned in (None, True) else "none"
    if kind not in _POSITIONS:
        raise CheckpointError(
            f"{where}: position_embedding_type {kind!r}: expected one of {', '.join(_POSITIONS)}"
        )
    return kind


def _rope_scaling(arguments: Mapping[str, Any], where: Path) -> str | None:
    linear = _number(arguments, "rotary_seq_len_interpolation_factor", where)
    factor = _number(arguments, "rope_scaling_factor", where)
    if linear is not None:
        return json.dumps({"rope_type": "linear", "factor": linear})
    if arguments.get("use_rope_scaling"):
        return llama3_scaling(8.0 if factor is None else factor).to_json()
    if "use_rope_scaling" not in arguments and factor not in (None, 1.0):
        raise CheckpointError(
            f"{where}: rope_scaling_factor is {factor:g}, of a program without Megatron-LM's "
            "use_rope_scaling; how it scales the positions is not known"
        )
    return None


VOCABULARIES = {
    "GPT2BPETokenizer": 50257,
    "BertWordPieceLowerCase": 30522,
    "BertWordPieceCase": 28996,
}
"""Vocabulary sizes of those tokenizers of Megatron whose files are always the same."""

_PUBLISHED = {50304: 50257, 30592: 30522, 29056: 28996}
"""Number of tokens in NVIDIA's published models without arguments, by number of token embedding
rows, which is padded to a multiple of 128: GPT-2, uncased BERT and cased BERT."""
_TOKENIZER_FILES = (
    "vocab_file", "merge_file", "tokenizer_model", "tokenizer_model_type", "tiktoken_pattern",
)  # fmt: skip


def tokenizer_of_arguments(arguments: Mapping[str, Any]) -> TokenizerConfig | None:
    """Return the tokenizer and its files that the arguments name, or None if they name none."""
    kind = arguments.get("tokenizer_type")
    if not isinstance(kind, str):
        return None
    files = {
        name: arguments[name] for name in _TOKENIZER_FILES if isinstance(arguments.get(name), str)
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
    """Return the number of token embedding rows that are not padding, or None if the checkpoint
    does not determine it. ``arguments`` are empty if the checkpoint has none."""
    if not arguments:
        return _PUBLISHED.get(rows)
    known = arguments.get("unpadded_vocab_size")
    if known is None:
        kind, size = arguments.get("tokenizer_type"), arguments.get("vocab_size")
        extra = arguments.get("vocab_extra_ids") or 0
        if kind == "NullTokenizer" and isinstance(size, int):
            known = size + 1
        elif isinstance(kind, str) and kind in VOCABULARIES and isinstance(extra, int):
            # As ours does, Megatron's WordPiece puts [BOS] and [EOS] before the extra ids.
            further = extra + 2 if extra and kind.startswith("BertWordPiece") else extra
            known = VOCABULARIES[kind] + further
            if not _pads(known, rows, arguments):
                known = None  # the user had other vocabulary files
    return known if isinstance(known, int) and 0 < known <= rows else None


def end_of_text(arguments: Mapping[str, Any], size: int) -> int | None:
    """Return the end-of-document token if a vocabulary has GPT-2's size, where it is the last
    token. Return None for other tokenizers."""
    gpt2 = "GPT2BPETokenizer"
    named = arguments.get("tokenizer_type", gpt2)
    return size - 1 if named == gpt2 and size == VOCABULARIES[gpt2] else None


def write_tokenizer(config: TokenizerConfig | None, target: Path, rows: int, name: str) -> bool:
    """Write a tokenizer as Hugging Face files to a new folder. Return False if its own files are
    not on this machine. ``rows`` is the number of embedding rows in the checkpoint ``name``. Raises
    CheckpointError if the files are not a tokenizer, or have more tokens than ``rows``."""
    if config is None or config.tokenizer_type not in TOKENIZERS:
        return False
    given = (config.vocab_file, config.merge_file, config.tokenizer_model)
    files = [Path(each) for each in given if each is not None]
    if not files or not all(path.exists() for path in files):
        return False
    names = ", ".join(map(str, files))
    try:
        made = build_tokenizer(config)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{names}: not the tokenizer of {name}: {error}") from None
    if made.vocab_size > rows:
        raise CheckpointError(
            f"{names}: {made.vocab_size:,} tokens, but the token embedding of {name} has {rows:,} "
            "rows; replace the files by those that it was trained with, or move them away"
        )
    target.mkdir()
    made.save_pretrained(target)
    return True


def _pads(size: int, rows: int, arguments: Mapping[str, Any]) -> bool:
    """Return whether the saved arguments would pad a vocabulary of ``size`` tokens to ``rows``.
    True if the arguments do not tell."""
    multiple = arguments.get("make_vocab_size_divisible_by")
    ranks = arguments.get("tensor_model_parallel_size", arguments.get("model_parallel_size", 1))
    if not (isinstance(multiple, int) and isinstance(ranks, int) and multiple * ranks > 0):
        return True
    return rows == -(-size // (multiple * ranks)) * multiple * ranks


class DescribedSource(Source):
    """Checkpoint source whose network is described by Megatron's arguments."""

    _shards: Mapping[str, Shard]
    has_moments = False
    """True if the checkpoint has usable optimizer state."""

    def names(self) -> Sequence[str]:
        return list(self._shards)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shard(name).canonical_shape

    def kinds(self, name: str) -> Sequence[str]:
        self._shard(name)
        trained = self.has_moments and name not in buffers_of(self.model)
        return ("weight", *MOMENTS) if trained else ("weight",)

    def copy_tokenizer(self, target: Path) -> bool:
        """Copy the tokenizer; see :meth:`Source.copy_tokenizer`. If the checkpoint has none, build
        it from the files that the arguments name, provided that they are on this machine."""
        if super().copy_tokenizer(target):
            return True
        padded = self.model.vocabulary.padded
        return write_tokenizer(self.tokenizer, target, padded, str(self.folder))

    def _shard(self, name: str) -> Shard:
        if name not in self._shards:
            raise CheckpointError(f"{self.folder} has no parameter {name}")
        return self._shards[name]
