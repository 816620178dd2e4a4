"""The network that GPT-NeoX's settings describe, which it saves as YAML or JSON files beside its
checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import CheckpointError, read_bytes
from megatron.checkpoint.source import resolved
from megatron.config import ModelConfig, ModelFlags

_POSITIONS = {"rotary": "rope", "learned": "learned_absolute", "alibi": "alibi", "none": "none"}
_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "gmlp_attn_dim": (64, None),
    "scale_embeddings": (False,),
    "use_mup": (False,),
    "moe_num_experts": (1, None),
    "norm": tuple(_NORMS),
    "pos_emb": tuple(_POSITIONS),
    "activation": ("gelu", "relu", "swiglu"),
    "rotary_emb_interleaved": (False,),
    "sliding_window_width": (None,),
}
"""Settings that change the network, and the values that can be represented."""


def find_settings(folder: Path) -> dict[str, Any] | None:
    """All settings of a run, from the ``configs`` folder in or beside a checkpoint; None without.
    Raises CheckpointError if a file is malformed, or PyYAML is not installed."""
    for place in (folder / "configs", folder.parent / "configs"):
        files = sorted([*place.glob("*.yml"), *place.glob("*.yaml"), *place.glob("*.json")])
        if files:
            found: dict[str, Any] = {}
            for file in files:
                found |= _read(file)
            return found
    return None


def _read(file: Path) -> dict[str, Any]:
    try:
        import yaml
    except ModuleNotFoundError:
        raise CheckpointError(f"{file}: reading it needs PyYAML: pip install pyyaml") from None
    try:
        text = read_bytes(file).decode("utf-8")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise CheckpointError(
                f"{file} has aliases (*name), of which a few lines make any amount of values; "
                "write the values themselves"
            )
        content = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{file} cannot be read: {reason}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} has no settings")
    return {str(key).replace("-", "_"): value for key, value in content.items()}


def model_of(settings: Mapping[str, Any], arguments: Any, folder: Path) -> ModelConfig:
    """The network that settings, by name with underscores, describe. ``arguments`` are the ``args``
    of the model states, which have the rows of the token embedding. Raises CheckpointError if a
    setting is missing, or cannot be represented."""
    for name, values in _HARMLESS.items():
        if settings.get(name, values[0]) not in values:
            raise CheckpointError(
                f"{folder}: the network has {name} {settings[name]!r}, which cannot be represented"
            )
    # It can mix kinds of attention: [[["global", "flash"], 24]].
    for entry in settings.get("attention_config") or [[["global"], "all"]]:
        names = entry[0] if isinstance(entry, list) else entry
        for name in names if isinstance(names, list) else [names]:
            if name not in ("global", "flash"):
                raise CheckpointError(
                    f"{folder}: the network has attention {name!r}, which cannot be represented"
                )

    def number(name: str, other: str | None = None) -> int:
        value = settings.get(name, settings.get(other or name))
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{folder}: its configs have no {name} (or it is {value!r})")
        return value

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    kind = settings.get("activation", "gelu")
    residual = bool(settings.get("gpt_j_residual", False))
    rows = settings.get("padded_vocab_size")
    if isinstance(arguments, Mapping):
        rows = arguments.get("padded_vocab_size", rows)
    if not isinstance(rows, int):
        raise CheckpointError(
            f"{folder}: the number of rows of the token embedding is not known; add "
            f"padded_vocab_size to a file in {folder / 'configs'}"
        )
    flags = ModelFlags(
        num_layers=number("num_layers"),
        hidden_size=hidden,
        ffn_hidden_size=settings.get("intermediate_size") or 4 * hidden,
        num_attention_heads=heads,
        num_query_groups=settings.get("num_kv_heads") or heads,
        seq_length=number("seq_length"),
        max_position_embeddings=number("max_position_embeddings", "seq_length"),
        position_embedding_type=_POSITIONS[settings.get("pos_emb", "learned")],
        rotary_base=float(settings.get("rotary_emb_base", 10000)),
        rotary_percent=float(settings.get("rotary_pct", 1.0)),
        normalization=_NORMS[settings.get("norm", "layernorm")],
        norm_epsilon=float(settings.get("layernorm_epsilon", 1e-5)),
        parallel_residual=residual,
        shared_parallel_norm=residual and bool(settings.get("gpt_j_tied", False)),
        glu_activation="swiglu" if kind == "swiglu" else None,
        relu=kind == "relu",
        # Fused, its GELU is the approximation by tanh, as in Megatron; unfused, the exact one.
        bias_gelu_fusion=kind != "gelu" or bool(settings.get("bias_gelu_fusion", False)),
        add_bias_linear=bool(settings.get("use_bias_in_attn_linear", True)),
        untie_embeddings_and_output_weights=bool(settings.get("no_weight_tying", False)),
        attention_dropout=float(settings.get("attention_dropout", 0.0)),
        hidden_dropout=float(settings.get("hidden_dropout", 0.0)),
        unpadded_vocab_size=rows,
        padded_vocab_size=rows,
    )
    return resolved(flags, folder)
