"""Models as runs train them."""

from __future__ import annotations

from megatron.config import RunConfig
from megatron.config.features import taking_part
from megatron.families import spec_of
from megatron.model.spec import ModelSpec


def trained_spec(config: RunConfig) -> ModelSpec:
    """The model of a run with the losses that it is trained by and what features add to it. Raises
    ConfigError as :func:`spec_of` does, or if the family has no such losses."""
    spec = spec_of(config.model, config.parallel)
    for feature in taking_part():
        spec = feature.model(spec, config)
    return spec
