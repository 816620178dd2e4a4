"""How positions enter a network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.config.flags import NOT_NEGATIVE, POSITIVE, option
from megatron.config.resolver import ConfigResolver, shared
from megatron.config.rope_scaling import RopeScaling, llama3_scaling


@dataclass(frozen=True, kw_only=True)
class _Positions:
    """What is resolved as it is given."""

    position_embedding_type: str = option(
        "learned_absolute", choices=("learned_absolute", "rope", "alibi", "none"), role="weights"
    )
    """How positions enter the model: a learned table, rotated queries and keys, attention biases
    that grow with the distance, or only by the causal order."""
    position_embedding_offset: int = option(0, bounds=NOT_NEGATIVE, role="weights")
    """Row of the learned table that holds position 0 (2 in OPT)."""
    rotary_base: float = option(10000.0, bounds=POSITIVE, megatron=True)
    """Base of the rotary frequencies."""
    rotary_percent: float = option(1.0, role="results", megatron=True)
    """Share of each head's width that is rotated."""
    rotary_base_local: float | None = option(None, bounds=POSITIVE, role="results")
    """Base of the rotary frequencies, unscaled, in blocks with a sliding window, where it is
    another there (Gemma 3)."""


@dataclass(frozen=True, kw_only=True)
class PositionsFlags(_Positions):
    """Positions."""

    max_position_embeddings: int | None = option(
        None, derived="seq-length", bounds=POSITIVE, megatron=True
    )
    """Rows of the learned position table; the longest sequence the model can take."""
    use_rotary_position_embeddings: bool = option(False)
    """Older spelling of --position-embedding-type rope."""
    rope_scaling: str | None = option(None, role="results")
    """How rotary frequencies are stretched beyond the trained length, as JSON in the form of
    Hugging Face's config.json: rope_type linear, llama3, yarn or longrope, and its numbers."""
    use_rope_scaling: bool = option(False)
    """Stretch the rotary frequencies as Llama 3.1 does."""
    rope_scaling_factor: float = option(8.0, bounds=POSITIVE)
    """Factor of --use-rope-scaling."""


@dataclass(frozen=True, kw_only=True)
class PositionsConfig(_Positions):
    """How positions enter a network.

    Attributes:
        max_position_embeddings: the longest sequence the model can take.
        rope_scaling: how rotary frequencies are stretched; ``default`` where they are not.
    """

    max_position_embeddings: int
    rope_scaling: RopeScaling

    def flags(self) -> dict[str, Any]:
        """The flags that ask for it, by field of :class:`PositionsFlags`."""
        scaling = self.rope_scaling
        return {
            **shared(self, _Positions),
            "max_position_embeddings": self.max_position_embeddings,
            "rope_scaling": None if scaling.is_default else scaling.to_json(),
        }


def resolve_positions(
    flags: PositionsFlags, seq_length: int, head_width: int, resolver: ConfigResolver
) -> PositionsConfig:
    """The positions that flags ask for.

    Args:
        flags: the flags.
        seq_length: tokens of a training sample.
        head_width: of queries and keys, which rotary positions rotate.
        draft: where the values came from.

    Raises:
        ConfigError: they contradict each other, or do not fit the two sizes.
    """
    kind = flags.position_embedding_type
    if flags.use_rotary_position_embeddings:
        resolver.check(
            not resolver.given("position_embedding_type") or kind == "rope",
            f"--use-rotary-position-embeddings contradicts "
            f"{resolver.show('position_embedding_type')}",
        )
        kind = resolver.put("position_embedding_type", "rope", "--use-rotary-position-embeddings")
    longest = resolver.fill(
        "max_position_embeddings", flags.max_position_embeddings, seq_length, "seq-length"
    )
    resolver.check(
        seq_length <= longest,
        f"{resolver.show('seq_length')} is longer than {resolver.show('max_position_embeddings')}",
    )
    resolver.check(
        not flags.position_embedding_offset or kind == "learned_absolute",
        f"{resolver.show('position_embedding_offset')} needs --position-embedding-type "
        f"learned_absolute, the only one with a table; it is {kind}",
    )
    given = shared(flags, _Positions) | {"position_embedding_type": kind}
    return PositionsConfig(
        **given,
        max_position_embeddings=longest,
        rope_scaling=_rope_scaling(flags, kind, head_width, resolver),
    )


def _rope_scaling(
    flags: PositionsFlags, kind: str, head_width: int, resolver: ConfigResolver
) -> RopeScaling:
    resolver.check(
        0 < flags.rotary_percent <= 1, f"{resolver.show('rotary_percent')} must be in (0, 1]"
    )
    asked = {
        "rope_scaling": flags.rope_scaling,
        "use_rope_scaling": flags.use_rope_scaling,
        "rotary_base_local": flags.rotary_base_local,
    }
    for name, value in asked.items():
        resolver.check(
            kind == "rope" or not value,
            f"{resolver.show(name)} needs --position-embedding-type rope; it is {kind}",
        )
    if kind != "rope":
        return RopeScaling("default")
    rotated = int(head_width * flags.rotary_percent)
    resolver.check(
        rotated > 0 and rotated % 2 == 0,
        f"{resolver.show('rotary_percent')} of {resolver.show('kv_channels')} rotates {rotated} "
        "channels; an even number is needed",
    )
    text = flags.rope_scaling
    llama3 = llama3_scaling(flags.rope_scaling_factor)
    if flags.use_rope_scaling:
        text = resolver.fill("rope_scaling", text, llama3.to_json(), "--use-rope-scaling")
    scaling = RopeScaling("default") if text is None else RopeScaling.parse(text, rotated // 2)
    resolver.check(
        not flags.use_rope_scaling or scaling == llama3,
        f"--use-rope-scaling, which is {llama3.to_json()}, contradicts "
        f"{resolver.show('rope_scaling')}; give one of them",
    )
    return scaling
