"""What models are trained for: preferences and a teacher's probabilities, beside the next token."""

from __future__ import annotations

from pkgutil import resolve_name

from megatron.config import RunConfig
from megatron.config.kinds.instruction import InstructionConfig
from megatron.families import spec_of
from megatron.model.spec import ModelSpec

__all__ = ["trained_spec"]

INSTRUCTION = "megatron.objectives.instruction:instruction_spec"
"""Imported by runs with instruction data only."""


def trained_spec(config: RunConfig) -> ModelSpec:
    """The model of a run with the losses that it is trained by. Raises ConfigError as
    :func:`spec_of` does, or if the family has no such losses."""
    spec = spec_of(config.model, config.parallel)
    if config.kind(InstructionConfig).sft:
        spec = resolve_name(INSTRUCTION)(config, spec)
    return spec
