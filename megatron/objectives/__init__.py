"""What models are trained for: preferences and a teacher's probabilities, beside the next token."""

from __future__ import annotations

from pkgutil import resolve_name

from megatron.config import RunConfig
from megatron.families import spec_of
from megatron.model.spec import ModelSpec

__all__ = ["trained_spec"]

ADAPTERS = "megatron.model.adapters:with_adapters"
"""Adds the adapters of ``--lora``, and freezes the rest; imported for runs with the flag only."""


def trained_spec(config: RunConfig) -> ModelSpec:
    """The model of a run with the losses that it is trained by, and its adapters. Raises
    ConfigError as :func:`spec_of` does, or if the family has no such losses."""
    spec = spec_of(config.model, config.parallel)
    return resolve_name(ADAPTERS)(spec, config) if config.adapters.lora else spec
