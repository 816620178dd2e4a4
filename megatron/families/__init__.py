"""Families of models: GPT, and those of features. A family defines its models' layer list, the
inputs of the first layer, the data and the losses. Features add families with
:meth:`~megatron.config.features.Feature.family`; all other code uses :func:`family_of`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from megatron.config import ConfigError, ModelConfig, ParallelConfig, RunConfig, Settings
from megatron.config.features import features, taking_part
from megatron.families.family import BlockLengths, Family, GenerationSpec
from megatron.families.gpt import FAMILY
from megatron.model.layer_list import LayerStack
from megatron.model.spec import ModelSpec
from megatron.parallel.tensor_parallel import TensorParallel

__all__ = [
    "BlockLengths",
    "Family",
    "GenerationSpec",
    "build_model",
    "family_names",
    "family_of",
    "refuse_unused",
    "spec_of",
    "trained_spec",
]


@cache
def family_names() -> tuple[str, ...]:
    return tuple(sorted(("gpt", *(name for f in features().values() for name in f.families))))


@cache
def family_of(name: str) -> Family:
    """Return the family with the given name. Raises ConfigError if it does not exist."""
    if name not in family_names():
        raise ConfigError(
            f"the model family {name!r} is unknown; the families are {', '.join(family_names())}"
        )
    for feature in features().values():
        if name in feature.families:
            family: Family = feature.family(name)
            return family
    return FAMILY


def refuse_unused(settings: Settings, family: Family) -> None:
    """Raise ConfigError if a flag was given that no model or sample of this family uses."""
    for name, setting in settings.items():
        if name in family.unused_flags and setting.origin.startswith("flag "):
            flag = setting.origin.removeprefix("flag ")
            using = [known for known in family_names() if name not in family_of(known).unused_flags]
            raise ConfigError(
                f"{flag} would change nothing: no model of the family {family.name} depends on it; "
                f"leave it out (the family {' or '.join(using)} has it: "
                f"{' or '.join(f'pretrain_{known}.py' for known in using)})"
            )


def spec_of(model: ModelConfig, parallel: ParallelConfig | None = None) -> ModelSpec:
    """Return the model specification of a configuration, including changes by features. Raises
    ConfigError if the family is unknown or does not have the requested head."""
    family = family_of(model.family)
    heads = _heads(family)
    if model.head not in heads:
        raise ConfigError(
            f"a model of the family {family.name} has no {model.head} head; its heads are "
            f"{', '.join(sorted(heads))}"
        )
    parallel = parallel or ParallelConfig()
    spec = family.spec(model, parallel)
    for feature in taking_part():
        spec = feature.network(spec, model, parallel)
    return replace(spec, widened=True) if model.fp32_residual_connection else spec


def _heads(family: Family) -> set[str]:
    """Return the kinds of output heads that a family supports, including heads that features add to
    it or to its base classes. The search ends at the first class that defines its own ``heads``."""
    heads = set(family.heads)
    for cls in type(family).__mro__:
        for feature in taking_part():
            heads.update(feature.heads.get(vars(cls).get("name", ""), ()))
        if "heads" in vars(cls):
            break
    return heads


def trained_spec(config: RunConfig) -> ModelSpec:
    """Return the model specification of a run, including training losses and changes by features.
    Raises ConfigError as :func:`spec_of` does, or if the family does not support these losses."""
    spec = spec_of(config.model, config.parallel)
    for feature in taking_part():
        spec = feature.model(spec, config)
    return spec


def build_model(
    model: ModelConfig,
    parallel: ParallelConfig | None = None,
    tp: TensorParallel | None = None,
) -> LayerStack:
    """Return the model of :func:`spec_of` as a single module, with uninitialised weights."""
    parallel = parallel or ParallelConfig()
    return LayerStack(spec_of(model, parallel).layers(tp or TensorParallel()), parallel)
