"""Reward models, whose head (megatron/model/heads.py) has a larger number for the better text."""

from __future__ import annotations

import dataclasses
from functools import partial

from megatron.config import ConfigError, RunConfig
from megatron.families import family_of
from megatron.features.preference.batch import PreferenceBatch
from megatron.model.layer_list import LayerState
from megatron.model.spec import ModelSpec


def with_pairs_of_texts(spec: ModelSpec, config: RunConfig) -> ModelSpec:
    """A reward model that is trained on :class:`PreferenceBatch`. Raises ConfigError if its family
    has none."""
    family = family_of(config.model.family)
    if config.model.head != "reward":
        raise ConfigError(
            f"--preference reward: models of the family {family.name} have no head for rewards; "
            "train a GPT"
        )
    return dataclasses.replace(spec, begin=partial(_begin, spec))


def _begin(spec: ModelSpec, batch: PreferenceBatch) -> LayerState:
    return spec.begin(batch.answers).changed(batch=batch)
