"""Patterns of blocks: the mixer and the MLP of each block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megatron.config.features import ModelPart
from megatron.config.flags import ConfigResolver, Setting, Settings, needs_value, option
from megatron.config.patterns import (
    but_every_last,
    every_first,
    layer_pattern,
    pattern_text,
    shortest,
)

ATTENTION, MAMBA, DELTA, NONE = "attention", "mamba", "delta", ""
"""Mixers of blocks: softmax attention, Mamba-2, Gated DeltaNet, or none (only an MLP)."""
LETTERS = {"M": MAMBA, "G": DELTA, "*": ATTENTION, "-": NONE, "E": NONE}
"""Mixers by the letters that Megatron uses. - stands for an MLP, and E for experts."""
VARIANTS = {"gated_delta_net": DELTA, "mamba2": MAMBA}
_OTHERS = {
    "|": "stages of a pipeline begin where --pipeline-partition says",
    "/": "layers of multi-token prediction are those of --mtp-num-layers",
    "D": "there is no sparse attention (DSA)",
}

_VARIANT = needs_value("experimental_attention_variant")


@dataclass(frozen=True, kw_only=True)
class PatternConfig(ModelPart):
    """Mixers of a network's blocks. ``mixers`` is empty if every block has attention and an MLP."""

    hybrid_layer_pattern: str | None = option(
        None, aliases=("--hybrid-override-pattern",), role="weights"
    )
    """Letters of the layers, each of which is one sublayer preceded by a norm: M for Mamba-2, G for
    Gated DeltaNet, * for attention, - for an MLP, E for experts. They determine --num-layers."""
    experimental_attention_variant: str | None = option(None, choices=tuple(VARIANTS))
    """Kind of layer that replaces attention in the blocks chosen by --linear-attention-freq: Gated
    DeltaNet, as in Qwen3-Next, or Mamba-2, as in Bamba."""
    linear_attention_freq: str | None = option(None, needs=_VARIANT)
    """Layers that use --experimental-attention-variant. N means all layers except N, 2N and so on,
    counted from 1. A list has a 1 for each of these layers and a 0 for each layer with attention,
    such as ([1]*3+[0]*1)*12."""
    mixers: tuple[str, ...] = option((), internal=True, role="weights")
    """Mixer of each block: attention, mamba, delta, or empty for none."""

    @property
    def idle(self) -> bool:
        return not self.mixers

    def mixer(self, layer: int) -> str:
        """Return the mixer of a block: one of the constants of this module."""
        return self.mixers[layer] if self.mixers else ATTENTION

    def lacks(self, layer: int) -> str | None:
        if self.mixer(layer) == NONE:
            return "attention"
        return None if self.hybrid_layer_pattern is None else "mlp"

    def resolve(
        self, layers: int, seq_length: int, longest: int | None, resolver: ConfigResolver
    ) -> PatternConfig:
        mixers = _mixers(self, layers, resolver)
        kind = "experimental_attention_variant"
        name = kind if self.hybrid_layer_pattern is None else "hybrid_layer_pattern"
        resolver.check(
            not (mixers and resolver.values.get("multi_latent_attention")),
            f"--multi-latent-attention contradicts {resolver.show(name)}, whose layers with "
            "attention have keys and values of each head; leave one of them out",
        )
        freq = self.linear_attention_freq if self.experimental_attention_variant else None
        if freq is not None and mixers:
            freq = str(shortest(tuple(mixer != ATTENTION for mixer in mixers), but_every_last))
        mixers = resolver.put("mixers", mixers, "the pattern of the layers")
        return replace(self, mixers=mixers, linear_attention_freq=freq)


def _mixers(part: PatternConfig, layers: int, resolver: ConfigResolver) -> tuple[str, ...]:
    pattern, variant = part.hybrid_layer_pattern, part.experimental_attention_variant
    if pattern is None:
        if variant is None:
            return ()
        freq = part.linear_attention_freq
        shown = resolver.show("experimental_attention_variant")
        resolver.check(
            freq is not None,
            f"{shown} needs --linear-attention-freq, which says where it replaces attention: 4 for "
            f"three layers of four, or a list with 0 or 1 for each, as [1]*{layers}",
        )
        linear = layer_pattern("--linear-attention-freq", freq or "", layers, but_every_last)
        return tuple(VARIANTS[variant] if each else ATTENTION for each in linear)
    shown = resolver.show("hybrid_layer_pattern")
    resolver.check(
        variant is None,
        f"{shown} contradicts {resolver.show('experimental_attention_variant')}: both say which "
        "layers have attention; give one of them",
    )
    wrong = next((letter for letter in pattern if letter not in LETTERS), "")
    reason = _OTHERS.get(wrong, "expected M, G, *, - and E alone")
    resolver.check(not wrong, f"{shown}: {wrong!r} is not a layer here; {reason}")
    resolver.check(
        len(pattern) == layers,
        f"{shown} has {len(pattern)} letters; expected one for each of the layers of "
        f"{resolver.show('num_layers')}, or leave that out",
    )
    _check_experts(pattern, shown, resolver)
    return tuple(LETTERS[letter] for letter in pattern)


def _check_experts(pattern: str, shown: str, resolver: ConfigResolver) -> None:
    """Raise ConfigError if the flags of experts contradict the letters E of the pattern."""
    values = resolver.values
    if not values.get("num_experts"):
        resolver.check("E" not in pattern, f"{shown} has layers of experts: give --num-experts")
        return
    resolver.check(
        "E" in pattern, f"{resolver.show('num_experts')}, but {shown} has no layer E of experts"
    )
    interval, freq = values["expert_interval"], values["moe_layer_freq"]
    name = "expert_interval" if interval is not None else "moe_layer_freq"
    sparse = tuple(letter == "E" for letter in pattern)
    resolver.check(
        interval is None
        and freq is not None
        and layer_pattern("--moe-layer-freq", freq, len(pattern), every_first) == sparse,
        f"{resolver.show(name)} contradicts {shown}, whose letters E are the layers of experts; "
        f"leave it out, or give --moe-layer-freq {pattern_text(sparse)}",
    )


def with_pattern(settings: Settings) -> Settings:
    """Add the settings that a pattern implies: the number of layers, and the layers with experts.
    Settings that are given are kept."""
    given = settings.get("hybrid_layer_pattern")
    if given is None or not given.value:
        return settings
    pattern, origin = given.value, "derived: --hybrid-layer-pattern"
    implied: dict[str, Any] = {}
    if not {"num_layers", "encoder_num_layers"} & settings.keys():
        implied["num_layers"] = len(pattern)
    if "E" in pattern and not {"moe_layer_freq", "expert_interval"} & settings.keys():
        implied["moe_layer_freq"] = pattern_text(letter == "E" for letter in pattern)
    return {**settings, **{name: Setting(value, origin) for name, value in implied.items()}}
