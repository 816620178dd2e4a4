"""Flags of multi-head latent attention, and the settings that Megatron's spellings stand for."""

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
"""Megatron's length of sequences before YaRN, which has no flag there."""


@dataclass(frozen=True, kw_only=True)
class LatentConfig(ModelPart):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values of
    all heads are linear maps of one short latent vector of each token. A key has a part of each
    head without positions, and a rotated part that all heads share."""

    multi_latent_attention: bool = option(False, role="weights", megatron=True)
    """Compute keys and values of all heads from one latent vector of each token, as DeepSeek-V2 and
    V3; needs --qk-layernorm where the latent vectors are normalised, as there."""
    q_lora_rank: int | None = _weights(None)
    """Numbers of the latent vector of the queries; without it queries are a linear map of the
    hidden states."""
    kv_lora_rank: int = _weights(32)
    """Numbers of the latent vector of keys and values."""
    qk_head_dim: int = _weights(128)
    """Channels of a query or key head without positions."""
    qk_pos_emb_head_dim: int = _weights(64, bounds=_EVEN)
    """Channels of a query head that are rotated; those of the keys are shared by all heads."""
    v_head_dim: int = _weights(128)
    """Channels of a value head."""
    latent_norm_epsilon: float | None = option(
        None, derived="norm-epsilon", bounds=POSITIVE, role="results", needs=_LATENT
    )
    """Epsilon of the norms of latent vectors."""
    latent_pairs: bool = option(True, internal=True)
    """Whether the files that the weights were read from have the rotated channels as pairs of
    neighbours."""

    models: ClassVar[tuple[str, ...]] = ("gpt",)
    """Families whose blocks can have it."""

    @property
    def idle(self) -> bool:
        return not self.multi_latent_attention

    @property
    def latent_width(self) -> int:
        """Numbers that generation keeps of each token and block."""
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
        """Refuse other families than GPT."""
        resolver.check(
            self.idle or family in self.models,
            f"--multi-latent-attention: models of the family {family} have no latent attention; "
            "leave it out, or train a GPT",
        )


@dataclass(frozen=True, kw_only=True)
class LatentSpellings(FlagSection):
    """Megatron's flags of RoPE scaling in latent attention, which are --rope-scaling here."""

    after: ClassVar[str] = "model"

    rotary_scaling_factor: float = option(1.0, bounds=POSITIVE, needs=_LATENT)
    """With --multi-latent-attention: same as the factor of --rope-scaling '{"rope_type": "yarn",
    "original_max_position_embeddings": 4096}'; 1 scales nothing."""
    mscale: float = option(1.0, bounds=POSITIVE, needs=_LATENT)
    """Same as the key mscale there."""
    mscale_all_dim: float = option(0.0, bounds=NOT_NEGATIVE, needs=_LATENT)
    """Same as the key mscale_all_dim there."""


def with_scaling(settings: Settings) -> Settings:
    """Return the settings of a run with --rope-scaling where Megatron's flags say it. Raises
    ConfigError where both are given and differ."""

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
