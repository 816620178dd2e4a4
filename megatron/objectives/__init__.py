"""What models are trained for: preferences and a teacher's probabilities, beside the next token."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name

from megatron.config import RunConfig
from megatron.families import spec_of
from megatron.model.spec import ModelSpec

__all__ = ["trained_spec"]

_OBJECTIVES: dict[Callable[[RunConfig], bool], str] = {
    lambda config: config.distillation.kd: "megatron.objectives.distillation:with_teacher",
}
"""Which runs have an objective, and the function that gives it to their model, from that and the
configuration. Runs without one do not import it."""


def trained_spec(config: RunConfig) -> ModelSpec:
    """The model of a run with the losses that it is trained by. Raises ConfigError as
    :func:`spec_of` does, or if the family has no such losses."""
    spec = spec_of(config.model, config.parallel)
    for has, name in _OBJECTIVES.items():
        if has(config):
            spec = resolve_name(name)(spec, config)
    return spec
