"""Flags for multi-head latent attention, and conversion of Megatron's RoPE scaling flags."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from megatron.config.features import FlagSection, ModelPart
from megatron.config.flags import (
    NOT_NEGATIVE,
    POSITIVE,
    Bounds,
    ConfigError,
    ConfigResolver,
    Setting,
    Settings,
    needs_value,
    option,
)
from megatron.config.sections import Latents

if TYPE_CHECKING:
    from megatron.config import ModelConfig

_LATENT = needs_value("multi_latent_attention", True, refused=False)
_weights = partial(option, role="weights", needs=_LATENT, megatron=True, bounds=POSITIVE)
_EVEN = Bounds(lambda value: value > 0 and value % 2 == 0, "must be positive and even")
_ORIGINAL_LENGTH = 4096
"""Sequence length before YaRN scaling that Megatron assumes; it has no flag for it."""


@dataclass(frozen=True, kw_only=True)
class LatentConfig(ModelPart):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Keys and values of all heads are linear projections of one short latent vector per token. A key
    consists of channels without positions, which each head has, and rotated channels, which all
    heads share."""

    multi_latent_attention: bool = option(False, role="weights", megatron=True)
    """Compute keys and values of all heads from one latent vector per token, as in DeepSeek-V2 and
    V3. Add
    --qk-layernorm to normalise the latent vectors, as these models do."""
    q_lora_rank: int | None = _weights(None)
    """Size of the latent vector for queries. By default, queries are projected directly from the
    hidden states."""
    kv_lora_rank: int = _weights(32)
    """Size of the latent vector for keys and values."""
    qk_head_dim: int = _weights(128)
    """Number of channels of a query or key head without positions."""
    qk_pos_emb_head_dim: int = _weights(64, bounds=_EVEN)
    """Number of rotated channels in a query head. All heads share the rotated channels of keys."""
    v_head_dim: int = _weights(128)
    """Number of channels of a value head."""
    latent_norm_epsilon: float | None = option(
        None, derived="norm-epsilon", bounds=POSITIVE, role="results", needs=_LATENT
    )
    """Epsilon in the norms of latent vectors."""
    latent_pairs: bool = option(True, internal=True)
    """True if the checkpoint that was read stores rotated channels as adjacent pairs."""

    models: ClassVar[tuple[str, ...]] = ("gpt",)
    """Model families whose blocks can have latent attention."""

    @property
    def idle(self) -> bool:
        return not self.multi_latent_attention

    @property
    def latent_width(self) -> int:
        """Number of elements that generation caches per token and block."""
        return self.kv_lora_rank + self.qk_pos_emb_head_dim

    def head_widths(self) -> tuple[int, int] | None:
        if self.idle:
            return None
        return self.qk_head_dim + self.qk_pos_emb_head_dim, self.qk_pos_emb_head_dim

    def memory(self, layer: int, model: ModelConfig, tensor_size: int) -> Latents | None:
        return None if self.idle else Latents(self.latent_width)

    def resolve(
        self, layers: int, seq_length: int, longest: int | None, resolver: ConfigResolver
    ) -> LatentConfig:
        if self.idle:
            return self
        values = resolver.values
        resolver.check(
            values["num_query_groups"] == values["num_attention_heads"],
            f"{resolver.show('num_query_groups')} contradicts --multi-latent-attention, where each "
            f"head has its keys: leave it out, or give {values['num_attention_heads']}",
        )
        for name, why in (
            ("add_qkv_bias", "the maps from latent vectors to heads have no biases"),
            ("add_proj_bias", "latent vectors have biases where the output projection has one"),
            ("clip_qkv", "queries, keys and values are not made one by one"),
            ("attention_output_gate", "there is no projection of a gate next to its queries"),
            ("attention_temperature", "its queries are not scaled by their position"),
            ("rotary_interleaved", "the rotated channels of a head are two halves"),
            ("qk_l2_norm", "it is the latent vectors that are normalised"),
            ("qk_layernorm_whole", "it is the latent vectors that are normalised"),
            ("qk_layernorm_after_rope", "it is the latent vectors that are normalised"),
        ):
            resolver.check(
                not values[name],
                f"{resolver.show(name)} contradicts --multi-latent-attention: {why}; leave it out",
            )
        return self

    def check_family(self, family: str, resolver: ConfigResolver) -> None:
        """Report model families other than GPT as an error."""
        resolver.check(
            self.idle or family in self.models,
            f"--multi-latent-attention: models of the family {family} have no latent attention; "
            "leave it out, or train a GPT",
        )


@dataclass(frozen=True, kw_only=True)
class LatentSpellings(FlagSection):
    """Megatron's flags for --rope-scaling in latent attention."""

    after: ClassVar[str] = "model"

    rotary_scaling_factor: float = option(1.0, bounds=POSITIVE, needs=_LATENT)
    """With --multi-latent-attention: the factor in --rope-scaling '{"rope_type": "yarn",
    "original_max_position_embeddings": 4096}'. 1 disables scaling."""
    mscale: float = option(1.0, bounds=POSITIVE, needs=_LATENT)
    """The key mscale in that --rope-scaling (see --rotary-scaling-factor)."""
    mscale_all_dim: float = option(0.0, bounds=NOT_NEGATIVE, needs=_LATENT)
    """The key mscale_all_dim in that --rope-scaling (see --rotary-scaling-factor)."""


def with_scaling(settings: Settings) -> Settings:
    """Derive --rope-scaling from Megatron's flags for it, if these are given. Raises ConfigError if
    --rope-scaling is also given and differs."""

    def of(name: str) -> Any:
        default = LatentSpellings.__dataclass_fields__[name].default
        return settings[name].value if name in settings else default

    factor, scale, of_all = map(of, ("rotary_scaling_factor", "mscale", "mscale_all_dim"))
    latent = settings.get("multi_latent_attention", Setting(False, ""))
    if factor == 1.0 or not latent.value:
        return settings
    form = {"rope_type": "yarn", "factor": factor}
    form |= {"original_max_position_embeddings": _ORIGINAL_LENGTH}
    if of_all:
        form |= {"mscale": scale, "mscale_all_dim": of_all}
    elif scale != 1.0:
        from megatron.model.rope import mscale

        form |= {"attention_factor": mscale(factor, scale)}
    known, origin = settings.get("rope_scaling"), settings["rotary_scaling_factor"].origin
    if known is not None and known.value is not None and json.loads(known.value) != form:
        raise ConfigError(
            f"--rotary-scaling-factor {factor:g} is --rope-scaling '{json.dumps(form)}', and "
            f"--rope-scaling {known.value} ({known.origin}) is another: give one of them"
        )
    return settings | {"rope_scaling": Setting(json.dumps(form), origin)}
