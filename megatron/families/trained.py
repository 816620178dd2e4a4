"""What models are trained for, beside the next token, and which of their parameters are."""

from __future__ import annotations

from pkgutil import resolve_name

from megatron.config import RunConfig
from megatron.families import spec_of
from megatron.features.adapters.flags import AdapterConfig
from megatron.features.distillation.flags import DistillationConfig
from megatron.features.instruction.flags import InstructionConfig
from megatron.features.preference.flags import PreferenceConfig
from megatron.model.spec import ModelSpec

__all__ = ["trained_spec"]

INSTRUCTION = "megatron.features.instruction.objective:with_instruction"
PREFERENCE = "megatron.features.preference.objective:with_preference"
DISTILLATION = "megatron.features.distillation.objective:with_teacher"
ADAPTERS = "megatron.features.adapters.model:with_adapters"
"""Functions of a spec and the run's configuration, imported for runs that need them."""


def trained_spec(config: RunConfig) -> ModelSpec:
    """The model of a run with the losses that it is trained by, and its adapters. Raises
    ConfigError as :func:`spec_of` does, or if the family has no such losses."""
    changes = {
        INSTRUCTION: config.section(InstructionConfig).sft,
        PREFERENCE: config.section(PreferenceConfig).preference is not None,
        DISTILLATION: config.section(DistillationConfig).kd,
        ADAPTERS: config.section(AdapterConfig).lora,
    }
    spec = spec_of(config.model, config.parallel)
    for name, wanted in changes.items():
        if wanted:
            spec = resolve_name(name)(spec, config)
    return spec
