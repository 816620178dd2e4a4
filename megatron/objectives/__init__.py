"""What models are trained for: preferences and a teacher's probabilities, beside the next token."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name

from megatron.config import RunConfig
from megatron.config.kinds.instruction import InstructionConfig
from megatron.config.kinds.preference import PreferenceConfig
from megatron.families import spec_of
from megatron.model.spec import ModelSpec

__all__ = ["trained_spec"]

_OBJECTIVES: dict[Callable[[RunConfig], bool], str] = {
    lambda config: config.kind(PreferenceConfig).preference is not None: (
        "megatron.objectives.preference:with_preference"
    ),
    lambda config: config.kind(InstructionConfig).sft: (
        "megatron.objectives.instruction:with_instruction"
    ),
    lambda config: config.adapters.lora: "megatron.model.adapters:with_adapters",
}
"""Which runs have an objective or adapters, and the function that gives it to their model, from that and the
configuration. Runs without it do not import it."""


def trained_spec(config: RunConfig) -> ModelSpec:
    """The model of a run with the losses that it is trained by, and its adapters. Raises ConfigError as
    :func:`spec_of` does, or if the family has no such losses."""
    spec = spec_of(config.model, config.parallel)
    for has, name in _OBJECTIVES.items():
        if has(config):
            spec = resolve_name(name)(spec, config)
    return spec
