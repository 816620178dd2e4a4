"""Granite, and HyperCLOVA X, which has norms after attention and MLP too: Llama with factors of
embeddings, residual sums, attention scores and logits."""

from __future__ import annotations

from typing import Any

from megatron.config import ModelConfig
from megatron.formats.huggingface.config_reader import BIASES, HFConfigReader
from megatron.formats.huggingface.decoders.relatives import relative, relative_entries
from megatron.formats.huggingface.entries import Condition, norm
from megatron.formats.huggingface.llama import DIVISIBLE

MULTIPLIERS = ("embedding_multiplier", "logits_scaling", "residual_multiplier")
FACTORS = frozenset({"query_pre_attn_scalar", *MULTIPLIERS})
"""Features that the factors are."""


def short(value: float) -> float:
    """The nearest number of 15 decimal digits, so that one that is inverted twice is as it was."""
    return float(f"{value:.15g}")


def read_multipliers(given: HFConfigReader) -> dict[str, Any]:
    """The flags of the factors; 1 is none. Raises CheckpointError if one is not positive."""
    values = {name: given.number(name) for name in (*MULTIPLIERS, "attention_multiplier")}
    for name, value in values.items():
        if value <= 0:
            given.refuse(name, value, "expected a positive number")
    scale = values.pop("attention_multiplier")
    return {
        **{name: None if value == 1.0 else value for name, value in values.items()},
        "query_pre_attn_scalar": short(scale**-2),
    }


def write_multipliers(model: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`read_multipliers`."""
    flags, attention = model.flags(), model.attention
    scale = attention.query_pre_attn_scalar**-0.5
    usual = attention.query_pre_attn_scalar == attention.kv_channels
    return {
        **{name: getattr(flags, name) or 1.0 for name in MULTIPLIERS},
        "attention_multiplier": scale if usual else short(scale),
    }


GRANITE = relative(
    "Granite",
    "granite",
    "GraniteForCausalLM",
    biases=BIASES,
    features=FACTORS,
    read=lambda given, fields: read_multipliers(given),
    write=write_multipliers,
    rewards=False,
)


def _post_normed(model: ModelConfig) -> bool:
    return model.norm.post_norm


def _read_hyperclova(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    if given.content.get("attention_multiplier") is None:
        width = fields["kv_channels"]
        given.content = given.content | {"attention_multiplier": width**-0.5}
    flags = read_multipliers(given)
    if flags["logits_scaling"] is not None:  # here a factor of the logits
        flags["logits_scaling"] = short(1 / flags["logits_scaling"])
    return flags | {"post_norm": given.flag("use_post_norm")}


def _write_hyperclova(model: ModelConfig) -> dict[str, Any]:
    keys = write_multipliers(model)
    return keys | {
        "logits_scaling": short(1 / keys["logits_scaling"]),
        "use_post_norm": model.norm.post_norm,
    }


_AFTER: Condition = _post_normed
HYPERCLOVAX = relative(
    "HyperCLOVA X",
    "hyperclovax",
    "HyperCLOVAXForCausalLM",
    relative_entries(
        norm("attention_post_norm", "post_norm1", when=_AFTER),
        norm("mlp_post_norm", "post_norm2", when=_AFTER),
    ),
    biases=BIASES,
    features=FACTORS | {"post_norm"},
    read=_read_hyperclova,
    write=_write_hyperclova,
    requirements=(DIVISIBLE,),
    rewards=False,
)
