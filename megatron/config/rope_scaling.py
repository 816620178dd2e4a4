"""How rotary frequencies are stretched, as ``--rope-scaling`` says it in JSON.

The forms are those of ``rope_scaling`` (``rope_parameters`` since version 5) in the ``config.json``
of Hugging Face's models; ``megatron.model.rope`` computes what they stand for.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from megatron.config.flags import ConfigError

_ORIGINAL = "original_max_position_embeddings"
_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL),
    "longrope": ("short_factor", "long_factor", _ORIGINAL),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "dynamic": (_ORIGINAL,),
    "yarn": (
        "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    ),
    "longrope": ("factor", "attention_factor"),
}  # fmt: skip


@dataclass(frozen=True)
class RopeScaling:
    """A way to stretch rotary frequencies; what a type does not use is None.

    Attributes:
        rope_type: ``default``, ``linear``, ``dynamic``, ``llama3``, ``yarn`` or ``longrope``.
        factor: how many times longer sequences get.
        original_max_position_embeddings: length before the stretching.
        low_freq_factor: llama3: wavelengths above the original length by this are stretched whole.
        high_freq_factor: llama3: wavelengths below the original length by this stay.
        attention_factor: yarn, longrope: what cosines and sines are multiplied by; derived from
            the factor without it.
        beta_fast: yarn: pairs that turn more often over the original length stay (32 if not given).
        beta_slow: yarn: pairs that turn less often are stretched whole (1 if not given).
        mscale: yarn: with ``mscale_all_dim`` another way to the attention factor.
        mscale_all_dim: see ``mscale``.
        truncate: yarn: whether the range between the two is rounded to whole channel pairs.
        short_factor: longrope: divisor of each pair's frequency up to the original length.
        long_factor: longrope: the same for longer sequences.
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

    @property
    def is_default(self) -> bool:
        """Whether nothing is stretched."""
        return self.rope_type == "default"

    @classmethod
    def parse(cls, text: str, pairs: int) -> RopeScaling:
        """Reads and checks the JSON.

        Args:
            text: a JSON object with ``rope_type`` (or ``type``) and the numbers of that type.
            pairs: rotated channel pairs of a head, for each of which longrope has a factor.

        Raises:
            ConfigError: it is none, the type is unknown, a number is missing, unknown or wrong.
        """
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--rope-scaling {text} is no JSON: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"--rope-scaling {text} must be a JSON object, as in {EXAMPLE}")
        older = values.pop("type", None)
        kind = values.pop("rope_type", older)
        if not isinstance(kind, str) or kind not in _REQUIRED:
            raise ConfigError(
                f"--rope-scaling {text}: rope_type is {kind!r}; it must be one of "
                f"{', '.join(_REQUIRED)}"
            )
        # Hugging Face writes null for what is not given.
        values = {name: value for name, value in values.items() if value is not None}
        _check_names(text, kind, set(values))
        for name, value in values.items():
            values[name] = _checked(text, name, value, pairs)
        scaling = cls(rope_type=kind, **values)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        if low is not None and high is not None and not low < high:
            raise ConfigError(
                f"--rope-scaling {text}: high_freq_factor {high:g} must be above low_freq_factor "
                f"{low:g}"
            )
        return scaling

    def to_json(self) -> str:
        """The JSON that :meth:`parse` reads."""
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        return json.dumps(values)


EXAMPLE = '{"rope_type": "linear", "factor": 2.0}'
"""A value of --rope-scaling, for messages."""


def llama3_scaling(factor: float) -> RopeScaling:
    """The scaling of Llama 3.1 (Grattafiori et al. 2024, arXiv:2407.21783), which
    ``--use-rope-scaling`` means: its other three numbers are fixed, in Megatron too."""
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
        known = ", ".join(sorted(required | optional)) or "nothing more"
        raise ConfigError(
            f"--rope-scaling {text}: rope_type {kind} has no {unknown}; it takes {known}"
        )


def _checked(text: str, name: str, value: Any, pairs: int) -> Any:
    """A value in the type of its field."""
    if name == "truncate":
        if isinstance(value, bool):
            return value
        raise ConfigError(f"--rope-scaling {text}: truncate must be true or false")
    if name in ("short_factor", "long_factor"):
        if isinstance(value, list) and len(value) == pairs and all(map(_positive, value)):
            return tuple(map(float, value))
        raise ConfigError(
            f"--rope-scaling {text}: {name} must be a list of {pairs} positive numbers, one for "
            "each pair of channels that is rotated"
        )
    whole = name == _ORIGINAL
    if not _positive(value) or (whole and int(value) != value):
        kind = "a positive whole number" if whole else "a positive number"
        raise ConfigError(f"--rope-scaling {text}: {name} must be {kind}")
    return int(value) if whole else float(value)


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
