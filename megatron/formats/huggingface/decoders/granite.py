"""Granite 3, 4 and SWA, and HyperCLOVA X: Llama with embedding, residual and logit multipliers."""

from __future__ import annotations

from typing import Any

from megatron.config import ModelConfig
from megatron.formats.features import Requirement
from megatron.formats.huggingface.config_reader import BIASES, FULL, SLIDING, HFConfigReader, short
from megatron.formats.huggingface.decoders.relatives import (
    SIZES,
    relative,
    relative_entries,
    rotating,
    without_rope,
)
from megatron.formats.huggingface.entries import Entry, linear, norm
from megatron.formats.huggingface.llama import DIVISIBLE, local_base

MULTIPLIERS = ("embedding_multiplier", "logits_scaling", "residual_multiplier")
FACTORS = frozenset({"query_pre_attn_scalar", *MULTIPLIERS})
"""Features that the multipliers need."""


def read_multipliers(given: HFConfigReader) -> dict[str, Any]:
    """Return the flags for the multipliers; None for a multiplier of 1. Raises CheckpointError if
    one is not positive."""
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
    """Return the keys for the multipliers: the inverse of :func:`read_multipliers`."""
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


def _read_hybrid(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    kinds = given.names("layer_types") or given.names("layers_block_type") or ["linear_attention"]
    given.unused("layer_types", "layers_block_type")
    if not set(kinds) <= {FULL, "attention"}:
        why = f"expected {FULL} alone; others are layers of Mamba"
        given.refuse("layer_types", sorted(set(kinds)), why)
    experts = given.content.get("num_local_experts", given.default("num_local_experts"))
    given.unused("num_local_experts", "num_experts_per_tok", "router_aux_loss_coef")
    if experts != 0:
        given.refuse("num_local_experts", experts, "expected 0, a dense model")
    given.choice("position_embedding_type", {"rope": {}})
    given.unused("intermediate_size", *(key for key in given.content if key.startswith("mamba_")))
    given.unused("time_step_limit", "output_router_logits")
    return read_multipliers(given)


GRANITE4 = relative(
    "Granite 4",
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    relative_entries(
        mlp=(
            *linear("mlp.up", "shared_mlp.input_linear"),
            *linear("mlp.down", "shared_mlp.output_linear"),
        )
    ),
    keys={
        "shared_intermediate_size" if key == "intermediate_size" else key: field
        for key, field in SIZES.items()
    },
    biases=("attention",),
    features=FACTORS,
    read=_read_hybrid,
    write=lambda model: {
        **write_multipliers(model),
        "layer_types": [FULL] * model.num_layers,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "mamba_n_heads": 1,  # required to divide the hidden size, even without Mamba layers
    },
    rewards=False,
)
"""Granite 4 models that are dense: without Mamba layers or experts. Gate and up are one tensor."""


def _read_swa(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """Read ``layer_rope_theta``, which has the rotary base of each block. 0 means no rotation."""
    layers, base = fields["num_layers"], fields["rotary_base"]
    kinds = given.names("layer_types") or _all_but_first_of(layers)
    thetas = given.content.get("layer_rope_theta") or [base] * layers
    given.unused("layer_rope_theta")
    numbers = isinstance(thetas, list) and all(isinstance(theta, int | float) for theta in thetas)
    if not numbers or len(thetas) != layers or min(thetas) < 0:
        given.refuse(
            "layer_rope_theta", thetas, f"expected a number, 0 or more, for {layers} blocks"
        )
    wide, narrow = (
        {theta for theta, each in zip(thetas, kinds, strict=True) if each == kind and theta}
        for kind in (FULL, SLIDING)
    )
    if len(wide) > 1 or len(narrow) > 1:
        given.refuse("layer_rope_theta", thetas, "all blocks of a kind must have the same, or 0")
    scaled = fields["rope_scaling"] is not None
    base = float(next(iter(wide or (narrow if scaled else ())), base))
    local = float(next(iter(narrow), base))
    if local != base and scaled:
        given.refuse("layer_rope_theta", thetas, "RoPE with scaling must have one base")
    return {
        **read_multipliers(given),
        **without_rope(not theta for theta in thetas),
        "rotary_base": base,
        "rotary_base_local": None if local == base else local,
    }


def _write_swa(model: ModelConfig) -> dict[str, Any]:
    bases = [
        local_base(model) if window else model.positions.rotary_base for window in model.windows
    ]
    rotated = zip(bases, rotating(model), strict=True)
    return write_multipliers(model) | {"layer_rope_theta": [base * each for base, each in rotated]}


def _all_but_first_of(layers: int) -> list[str]:
    return [SLIDING if n % 4 else FULL for n in range(layers)]


GRANITE_SWA = relative(
    "Granite SWA",
    "granite_swa",
    "GraniteSWAForCausalLM",
    relative_entries((Entry("attention.sinks", ("self_attn.sinks",)),)),
    fixed={"softmax_type": "learnable"},
    biases=BIASES,
    features=FACTORS | {"no_rope_freq", "rotary_base_local"},
    windows=_all_but_first_of,
    read=_read_swa,
    write=_write_swa,
    requirements=(
        Requirement(
            lambda model: (
                model.positions.rotary_base_local is None or model.positions.rope_scaling.is_default
            ),
            "no --rotary-base-local next to --rope-scaling",
        ),
    ),
    rewards=False,
)
"""Granite with attention sinks, a window in some blocks, and RoPE that may vary by block."""


def _read_hyperclova(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    if given.content.get("attention_multiplier") is None:
        width = fields["kv_channels"]
        given.content = given.content | {"attention_multiplier": width**-0.5}
    flags = read_multipliers(given)
    # HyperCLOVA X multiplies the logits, Granite divides them
    if flags["logits_scaling"] is not None:
        flags["logits_scaling"] = short(1 / flags["logits_scaling"])
    return flags | {"post_norm": given.flag("use_post_norm")}


def _write_hyperclova(model: ModelConfig) -> dict[str, Any]:
    keys = write_multipliers(model)
    return keys | {
        "logits_scaling": short(1 / keys["logits_scaling"]),
        "use_post_norm": model.norm.post_norm,
    }


HYPERCLOVAX = relative(
    "HyperCLOVA X",
    "hyperclovax",
    "HyperCLOVAXForCausalLM",
    relative_entries(
        norm("attention_post_norm", "post_norm1", when=lambda m: m.norm.post_norm),
        norm("mlp_post_norm", "post_norm2", when=lambda m: m.norm.post_norm),
    ),
    biases=BIASES,
    features=FACTORS | {"post_norm"},
    read=_read_hyperclova,
    write=_write_hyperclova,
    requirements=(DIVISIBLE,),
    rewards=False,
)
