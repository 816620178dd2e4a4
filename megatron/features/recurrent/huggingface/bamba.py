"""Bamba: a Llama with Mamba-2 instead of attention in most blocks, whose attention applies RoPE to
half of each head. Also the entries and keys of Mamba-2 that other architectures share.

Shapes: C channels of a convolution, K tokens of its kernel.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from megatron.config import ModelConfig
from megatron.config.patterns import pattern_text
from megatron.features.recurrent.flags import MambaConfig, shortest_limits
from megatron.features.recurrent.pattern import ATTENTION, DELTA, MAMBA, PatternConfig
from megatron.formats.features import Requirement
from megatron.formats.huggingface.config_reader import BIASES, HFConfigReader
from megatron.formats.huggingface.decoders.relatives import relative
from megatron.formats.huggingface.entries import SEPARATE_QKV as QKV
from megatron.formats.huggingface.entries import (
    Condition,
    Entry,
    OfBlock,
    Reordering,
    attention_biased,
    decoder_entries,
    linear,
    norm,
    weight,
)
from megatron.formats.huggingface.llama import ACTIVATION, KEYS, gated_mlp

CHANNELS = Reordering(
    "a channel by itself", 1, lambda values, _: (values.unsqueeze(1),),
    lambda parts, _: parts[0].squeeze(1),
)  # fmt: skip
"""Depthwise convolution weights, [C, K] in this project and [C, 1, K] in checkpoint files."""


def with_mixer(mixer: str) -> OfBlock:
    """Return a function that returns 1 for blocks with the mixer ``mixer``, and 0 for others."""
    return lambda model, n: int(model.part(PatternConfig).mixer(n) == mixer)


def at(blocks: OfBlock, *entries: Entry) -> tuple[Entry, ...]:
    """Restrict entries to the blocks for which ``blocks`` is not 0."""
    return tuple(replace(entry, at=blocks) for entry in entries)


def _projections_biased(model: ModelConfig) -> bool:
    return model.part(MambaConfig).mamba_proj_bias


def mamba_entries(theirs: str) -> tuple[Entry, ...]:
    """Return the entries of Mamba-2 layers. ``theirs`` is the name of the module in checkpoint
    files."""
    entries = (
        *linear("attention.in_proj", f"{theirs}.in_proj", bias=_projections_biased),
        Entry("attention.conv.weight", (f"{theirs}.conv1d.weight",), CHANNELS),
        Entry(
            "attention.conv.bias",
            (f"{theirs}.conv1d.bias",),
            when=lambda model: model.part(MambaConfig).mamba_conv_bias,
        ),
        *(
            Entry(f"attention.{ours}", (f"{theirs}.{name}",))
            for ours, name in (("dt_bias", "dt_bias"), ("a_log", "A_log"), ("skip", "D"))
        ),
        *weight("attention.norm", f"{theirs}.norm"),
        *linear("attention.out_proj", f"{theirs}.out_proj", bias=_projections_biased),
    )
    return at(with_mixer(MAMBA), *entries)


def attention_entries(theirs: str, biased: Condition) -> tuple[Entry, ...]:
    """Return the entries of attention layers. ``theirs`` is the name of the module in the files."""
    names = [f"{theirs}.{name}_proj" for name in "qkv"]
    return at(
        with_mixer(ATTENTION),
        *linear("attention.qkv", *names, form=QKV, bias=biased),
        *linear("attention.proj", f"{theirs}.o_proj", bias=biased),
    )


MAMBA_LAYERS = (
    Requirement(lambda m: not m.part(MambaConfig).idle, "layers of Mamba-2"),
    Requirement(lambda m: DELTA not in m.part(PatternConfig).mixers, "no layers of Gated DeltaNet"),
    Requirement(
        lambda m: not m.part(MambaConfig).mamba_norm_before_gate, "no --mamba-norm-before-gate"
    ),
)
"""Requirements of all architectures with Mamba-2."""


def read_limit(given: HFConfigReader, key: str) -> tuple[float, float]:
    """Return the minimum and maximum step, (0, infinity) if the key is absent. Raises
    CheckpointError if the value is not two ascending numbers."""
    value = given.content.get(key)
    given.unused(key)
    if value is None:
        return (0.0, math.inf)
    numbers = [math.inf if each in ("inf", "Infinity") else each for each in _listed(value)]
    sound = len(numbers) == 2 and all(isinstance(each, int | float) for each in numbers)
    if not sound or not 0 <= numbers[0] < numbers[1]:
        given.refuse(key, value, "expected two numbers, the smaller one first")
    return float(numbers[0]), float(numbers[1])


def _listed(value: Any) -> list[Any]:
    """Convert a value to a list. In it, ``{"__float__": "Infinity"}``, as written by transformers
    5, becomes the text "Infinity"."""
    items = value if isinstance(value, list | tuple) else [value]
    return [each.get("__float__") if isinstance(each, dict) else each for each in items]


_SIZES = {
    "mamba_n_heads": "mamba_num_heads",
    "mamba_n_groups": "mamba_num_groups",
    "mamba_d_state": "mamba_state_dim",
    "mamba_d_conv": "mamba_conv_kernel_dim",
    "mamba_conv_bias": "mamba_conv_bias",
    "mamba_proj_bias": "mamba_proj_bias",
}


def _write(model: ModelConfig) -> dict[str, Any]:
    part = model.part(MambaConfig)
    mixers = model.part(PatternConfig).mixers
    return {
        "attn_layer_indices": [n for n, mixer in enumerate(mixers) if mixer == ATTENTION],
        "mamba_d_head": part.mamba_head_dim,
        "mamba_expand": part.width // model.hidden_size,
        "time_step_limit": list(part.step_limits),
    }


def _read(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    layers, heads = fields["num_layers"], fields["mamba_num_heads"]
    given.unused("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient", "attn_rotary_emb")
    width = given.whole("mamba_expand") * fields["hidden_size"]
    head_dim = given.content.get("mamba_d_head", "auto")
    given.unused("mamba_d_head", "layers_block_type", "layer_types")
    if width % heads or head_dim not in ("auto", width // heads):
        given.refuse(
            "mamba_d_head", head_dim, f"{heads} heads (mamba_n_heads) must be as wide together as "
            f"mamba_expand times hidden_size, {width}"
        )  # fmt: skip
    chosen = given.content.get("attn_layer_indices") or []
    given.unused("attn_layer_indices")
    if not set(chosen) <= set(range(layers)):
        given.refuse("attn_layer_indices", chosen, f"expected numbers below {layers}")
    if len(set(chosen)) == layers:
        given.refuse("attn_layer_indices", chosen, "no block has Mamba-2")
    return {
        "experimental_attention_variant": "mamba2",
        "linear_attention_freq": pattern_text(n not in chosen for n in range(layers)),
        "mamba_head_dim": width // heads,
        "mamba_step_limits": shortest_limits(*read_limit(given, "time_step_limit")),
    }


BAMBA = relative(
    "Bamba",
    "bamba",
    "BambaForCausalLM",
    decoder_entries(
        "model.embed_tokens",
        "model.layers.{n}",
        "model.final_layernorm",
        norm("attention_norm", "input_layernorm"),
        norm("mlp_norm", "pre_ff_layernorm"),
        mamba_entries("mamba"),
        attention_entries("self_attn", attention_biased),
        gated_mlp("mlp", "feed_forward"),
    ),
    keys=KEYS | ACTIVATION | _SIZES,
    features=("mixers",),
    biases=BIASES,
    share=0.5,
    requirements=(
        *MAMBA_LAYERS,
        Requirement(
            lambda m: m.part(PatternConfig).hybrid_layer_pattern is None,
            "no --hybrid-layer-pattern",
        ),
        Requirement(lambda m: m.positions.rotary_percent == 0.5, "--rotary-percent 0.5"),
        Requirement(
            lambda m: m.part(MambaConfig).width % m.hidden_size == 0,
            "--mamba-num-heads x --mamba-head-dim that --hidden-size divides",
        ),
    ),
    read=_read,
    write=_write,
    rewards=False,
)
