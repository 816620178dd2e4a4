"""Flags for position encodings and RoPE scaling.

The JSON of ``--rope-scaling`` is that of ``rope_scaling`` (``rope_parameters`` since version 5) in
Hugging Face's ``config.json``; ``megatron.model.rope`` computes the frequencies.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from megatron.config.flags import (
    NOT_NEGATIVE,
    POSITIVE,
    Bounds,
    ConfigError,
    ConfigResolver,
    needs_value,
    option,
    shared,
)
from megatron.config.patterns import FREQUENCY, every_last, in_pattern, resolved_pattern
from megatron.util.json_text import parse_json

_ROPE = needs_value("position_embedding_type", "rope")


@dataclass(frozen=True, kw_only=True)
class _Positions:
    """Fields shared by the flags and the resolved configuration."""

    position_embedding_type: str = option(
        "learned_absolute",
        choices=("learned_absolute", "sinusoidal", "rope", "alibi", "relative", "none"),
        role="weights",
    )
    """Position encoding: learned embeddings (learned_absolute), fixed sines and cosines
    (sinusoidal, as in XGLM), rotary embedding of queries and keys (rope), biases on the attention
    scores that are fixed (alibi) or learned by distance (relative, for T5), or none."""
    relative_attention_num_buckets: int = option(
        32,
        bounds=Bounds(lambda value: value >= 4, "must be at least 4"),
        role="weights",
        megatron=True,
    )
    """Relative positions: number of distance ranges, each with its own bias."""
    relative_attention_max_distance: int = option(
        128, bounds=POSITIVE, role="results", megatron=True
    )
    """Relative positions: distance from which all positions share one bias."""
    position_embedding_offset: int = option(0, bounds=NOT_NEGATIVE, role="weights")
    """Row of the learned or sinusoidal position embedding for position 0 (2 in OPT and XGLM)."""
    rotary_base: float = option(
        10000.0,
        aliases=("--rotary-position-embeddings-theta",),
        bounds=POSITIVE,
        megatron=("rotary_base", "rope_theta"),
        needs=_ROPE,
    )
    """RoPE: base of the frequencies (theta)."""
    rotary_percent: float = option(1.0, role="results", megatron=True, needs=_ROPE)
    """RoPE: fraction of each head's channels that are rotated."""
    rotary_interleaved: bool = option(False, role="results", megatron=True, needs=_ROPE)
    """RoPE: rotate adjacent channels together (0 with 1, 2 with 3, ...) instead of each channel of
    the first half with its counterpart in the second half."""
    no_rope_freq: int | str | None = option(None, bounds=FREQUENCY, role="results", needs=_ROPE)
    """RoPE: do not rotate queries and keys in every N-th block (NoPE). A list such as ([0]*3+[1])*4
    chooses the blocks instead: 1 for blocks without RoPE, 0 for the others."""
    attention_temperature: float | None = option(None, bounds=POSITIVE, role="results")
    """In blocks without rotary positions, multiply the query at position p (from 0) by 1 + x log(1
    + floor((p + 1) / --attention-temperature-floor)) for this x (attn_scale of Llama 4)."""
    attention_temperature_rotary: bool = option(
        False, role="results", needs=needs_value("attention_temperature")
    )
    """Apply --attention-temperature in the blocks with rotary positions instead, with p in place of
    p + 1, as in Ministral 3."""
    attention_temperature_floor: int = option(
        8192, bounds=POSITIVE, role="results", needs=needs_value("attention_temperature")
    )
    """Number of positions before --attention-temperature has an effect (floor_scale of Llama 4)."""
    rotary_base_local: float | None = option(None, bounds=POSITIVE, role="results")
    """RoPE: base of the frequencies in blocks with a sliding window, if it differs from
    --rotary-base (Gemma 3). These blocks have no RoPE scaling."""


@dataclass(frozen=True, kw_only=True)
class PositionsFlags(_Positions):
    """Positions."""

    max_position_embeddings: int | None = option(
        None,
        derived="seq-length; decoder-seq-length where that is longer",
        bounds=POSITIVE,
        megatron=True,
    )
    """Longest sequence that the model supports, in tokens; with learned_absolute, the number of
    rows of the position embedding."""
    use_rotary_position_embeddings: bool = option(False)
    """Older name of --position-embedding-type rope."""
    no_position_embedding: bool = option(False)
    """Same as --position-embedding-type none, if no other type is given."""
    rope_scaling: str | None = option(None, role="results")
    """RoPE scaling, as JSON in the form of Hugging Face's config.json: rope_type (linear, dynamic,
    llama3, yarn, longrope, proportional) and its parameters."""
    use_rope_scaling: bool = option(False)
    """Use the RoPE scaling of Llama 3.1."""
    rope_scaling_factor: float = option(8.0, bounds=POSITIVE, needs=needs_value("use_rope_scaling"))
    """Factor of --use-rope-scaling."""


@dataclass(frozen=True, kw_only=True)
class PositionsConfig(_Positions):
    """Resolved position encoding of a network."""

    max_position_embeddings: int
    rope_scaling: RopeScaling

    def rotates(self, layer: int) -> bool:
        """Return whether block ``layer`` (from 0) rotates queries and keys."""
        every = self.no_rope_freq
        skipped = every is not None and in_pattern(every, layer, every_last)
        return self.position_embedding_type == "rope" and not skipped

    @property
    def longest(self) -> int | None:
        """Maximum number of positions in a sequence; None for encodings without such a limit."""
        absolute = self.position_embedding_type in ("learned_absolute", "sinusoidal", "rope")
        return self.max_position_embeddings if absolute else None

    def flags(self) -> dict[str, Any]:
        """Return the flags that resolve to this position encoding, by field."""
        scaling = self.rope_scaling
        return {
            **shared(self, _Positions),
            "max_position_embeddings": self.max_position_embeddings,
            "rope_scaling": None if scaling.is_default else scaling.to_json(),
        }


def resolve_positions(
    flags: PositionsFlags,
    layers: int,
    seq_length: int,
    decoder_length: int | None,
    head_width: int,
    resolver: ConfigResolver,
) -> PositionsConfig:
    """Resolve the position encoding for heads with ``head_width`` channels. ``decoder_length`` is
    None if there is no decoder or only the data determine its length."""
    kind = flags.position_embedding_type
    if flags.use_rotary_position_embeddings:
        resolver.check(
            not resolver.given("position_embedding_type") or kind == "rope",
            f"--use-rotary-position-embeddings contradicts "
            f"{resolver.show('position_embedding_type')}",
        )
        kind = resolver.put("position_embedding_type", "rope", "--use-rotary-position-embeddings")
    if flags.no_position_embedding and not resolver.given("position_embedding_type"):
        kind = resolver.put("position_embedding_type", "none", "--no-position-embedding")
    resolver.check(
        not flags.no_position_embedding or kind != "learned_absolute",
        f"--no-position-embedding contradicts {resolver.show('position_embedding_type')}",
    )
    needed, how = max((seq_length, "seq-length"), (decoder_length or 0, "decoder-seq-length"))
    longest = resolver.fill("max_position_embeddings", flags.max_position_embeddings, needed, how)
    resolver.check(
        seq_length <= longest,
        f"{resolver.show('seq_length')} is longer than {resolver.show('max_position_embeddings')}"
        + f"; give --max-position-embeddings {seq_length}, and --rope-scaling or a higher "
        "--rotary-base if the model was trained at shorter sequences" * (kind == "rope"),
    )
    resolver.check(
        kind != "learned_absolute" or decoder_length is None or decoder_length <= longest,
        f"{resolver.show('decoder_seq_length')} is longer than "
        f"{resolver.show('max_position_embeddings')}: the decoder has the same position embedding "
        "as the encoder",
    )
    for name in ("relative_attention_num_buckets", "relative_attention_max_distance"):
        resolver.check(
            kind == "relative" or getattr(flags, name) == getattr(PositionsFlags, name),
            f"{resolver.show(name)} needs --position-embedding-type relative; it is {kind}",
        )
    resolver.check(
        kind != "relative"
        or flags.relative_attention_max_distance > flags.relative_attention_num_buckets // 2,
        f"{resolver.show('relative_attention_max_distance')} must be more than half of "
        f"{resolver.show('relative_attention_num_buckets')}, which are for single distances",
    )
    resolver.check(
        not flags.position_embedding_offset or kind in ("learned_absolute", "sinusoidal"),
        f"{resolver.show('position_embedding_offset')} needs --position-embedding-type "
        f"learned_absolute or sinusoidal, which have a position embedding; it is {kind}",
    )
    every = flags.no_rope_freq
    if every is not None and kind == "rope":
        every = resolved_pattern("no_rope_freq", every, layers, every_last, resolver)
    given = shared(flags, _Positions) | {"position_embedding_type": kind, "no_rope_freq": every}
    resolver.check(
        flags.attention_temperature is None
        or kind != "rope"
        or every is not None
        or flags.attention_temperature_rotary,
        f"{resolver.show('attention_temperature')} acts in blocks without rotary positions, and "
        "all have them; give --no-rope-freq",
    )
    scaling = _rope_scaling(flags, kind, head_width, resolver)
    return PositionsConfig(**given, max_position_embeddings=longest, rope_scaling=scaling)


def _rope_scaling(
    flags: PositionsFlags, kind: str, head_width: int, resolver: ConfigResolver
) -> RopeScaling:
    resolver.check(
        0 < flags.rotary_percent <= 1, f"{resolver.show('rotary_percent')} must be in (0, 1]"
    )
    for name in ("rope_scaling", "use_rope_scaling", "rotary_base_local"):
        resolver.check(
            kind == "rope" or not getattr(flags, name),
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


_ORIGINAL = "original_max_position_embeddings"
_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL),
    "longrope": ("short_factor", "long_factor", _ORIGINAL),
    "proportional": ("partial_rotary_factor",),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "dynamic": (_ORIGINAL,),
    "yarn": (
        "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    ),
    "longrope": ("factor", "attention_factor", "short_mscale", "long_mscale"),
}  # fmt: skip


@dataclass(frozen=True)
class RopeScaling:
    """RoPE scaling. Parameters that a type does not use are None.

    Attributes:
        rope_type: ``default``, ``linear``, ``dynamic``, ``llama3``, ``yarn``, ``longrope`` or
            ``proportional``.
        original_max_position_embeddings: sequence length before the scaling.
        low_freq_factor: llama3: wavelengths above original length / this are fully scaled.
        high_freq_factor: llama3: wavelengths below original length / this are not scaled.
        attention_factor: yarn, longrope: factor of cosines and sines; derived if not given.
        beta_fast: yarn: pairs with more rotations over the original length are not scaled (32).
        beta_slow: yarn: pairs with fewer rotations are fully scaled (1).
        mscale: yarn: determines the attention factor together with ``mscale_all_dim``.
        truncate: yarn: whether the range between the betas is rounded to whole channel pairs.
        short_factor: longrope: divisor of each pair's frequency up to the original length.
        long_factor: longrope: divisor of each pair's frequency for longer sequences.
        short_mscale: longrope: attention factor up to the original length (Phi-3.5-MoE).
        long_mscale: longrope: attention factor for longer sequences.
        partial_rotary_factor: proportional: fraction of the channel pairs that are rotated. These
            are the first ones, and have the frequencies of whole heads (Gemma 4).
    """

    rope_type: str
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    short_mscale: float | None = None
    long_mscale: float | None = None
    partial_rotary_factor: float | None = None

    @property
    def is_default(self) -> bool:
        """True if frequencies are not scaled."""
        return self.rope_type == "default"

    @classmethod
    def parse(cls, text: str, pairs: int) -> RopeScaling:
        """Parse and check a JSON object with ``rope_type`` (or ``type``) and its parameters.
        ``pairs`` is a head's number of rotated channel pairs, each with a longrope factor."""
        try:
            values = parse_json(text, f"--rope-scaling {text[:200]}")
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if not isinstance(values, dict):
            raise ConfigError(f"--rope-scaling {text} must be a JSON object, as in {EXAMPLE}")
        older = values.pop("type", None)
        kind = values.pop("rope_type", older)
        if not isinstance(kind, str) or kind not in _REQUIRED:
            raise ConfigError(
                f"--rope-scaling {text}: rope_type is {kind!r}; it must be one of "
                f"{', '.join(_REQUIRED)}"
            )
        # Hugging Face writes null for a parameter that is not given.
        values = {name: value for name, value in values.items() if value is not None}
        _check_names(text, kind, set(values))
        for name, value in values.items():
            values[name] = _checked(text, name, value, pairs)
        scaling = cls(rope_type=kind, **values)
        if (scaling.partial_rotary_factor or 0) > 1:
            raise ConfigError(f"--rope-scaling {text}: partial_rotary_factor must be at most 1")
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        if low is not None and high is not None and not low < high:
            raise ConfigError(
                f"--rope-scaling {text}: high_freq_factor {high:g} must be above low_freq_factor "
                f"{low:g}"
            )
        return scaling

    def to_json(self) -> str:
        """Return the scaling as JSON for :meth:`parse`."""
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        return json.dumps(values)


EXAMPLE = '{"rope_type": "linear", "factor": 2.0}'
"""Example of a --rope-scaling value, for error messages."""


def llama3_scaling(factor: float) -> RopeScaling:
    """Return Llama 3.1's scaling (Grattafiori et al. 2024, arXiv:2407.21783), which
    ``--use-rope-scaling`` selects. As in Megatron, everything but ``factor`` is fixed."""
    return RopeScaling(
        "llama3", factor, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )  # fmt: skip


def _check_names(text: str, kind: str, given: set[str]) -> None:
    required, optional = set(_REQUIRED[kind]), set(_OPTIONAL.get(kind, ()))
    if required - given:
        missing = ", ".join(sorted(required - given))
        raise ConfigError(f"--rope-scaling {text}: rope_type {kind} needs {missing} too")
    if given - required - optional:
        unknown = ", ".join(sorted(given - required - optional))
        known = ", ".join(sorted(required | optional)) or "none"
        raise ConfigError(
            f"--rope-scaling {text}: rope_type {kind} has no parameter {unknown}; it has {known}"
        )


def _checked(text: str, name: str, value: Any, pairs: int) -> Any:
    if name == "truncate":
        if isinstance(value, bool):
            return value
        raise ConfigError(f"--rope-scaling {text}: truncate must be true or false")
    if name in ("short_factor", "long_factor"):
        if isinstance(value, list) and len(value) == pairs and all(map(_positive, value)):
            return tuple(map(float, value))
        raise ConfigError(
            f"--rope-scaling {text}: {name} must be a list of {pairs} positive numbers, one for "
            "each rotated pair of channels"
        )
    whole = name == _ORIGINAL
    if not _positive(value) or (whole and int(value) != value):
        kind = "a positive integer" if whole else "a positive number"
        raise ConfigError(f"--rope-scaling {text}: {name} must be {kind}")
    return int(value) if whole else float(value)


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
