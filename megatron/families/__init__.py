"""What the models that can be trained are, a file each.

``megatron/families/<name>.py`` says what the family of that name is: its layer list, what of a
batch its layers need, its data and its losses. A new family is such a file and its layer list;
everything else asks :func:`family_of`.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module

from megatron.config import ConfigError, ModelConfig, ParallelConfig
from megatron.families.family import Family
from megatron.model.layer_list import LayerStack
from megatron.model.spec import ModelSpec
from megatron.parallel.tensor_parallel import TensorParallel

__all__ = ["Family", "build_model", "family_names", "family_of", "spec_of"]


@cache
def family_names() -> tuple[str, ...]:
    """Names of all families, sorted."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return tuple(sorted(name for name in found if name != "family"))


@cache
def family_of(name: str) -> Family:
    """The family of that name.

    Raises:
        ConfigError: there is no such family.
    """
    if name not in family_names():
        raise ConfigError(
            f"the model family {name!r} is unknown; the families are {', '.join(family_names())}"
        )
    return import_module(f"{__name__}.{name}").FAMILY


def spec_of(model: ModelConfig, parallel: ParallelConfig | None = None) -> ModelSpec:
    """The model that a configuration describes, as its family builds it; see :meth:`Family.spec`.

    Raises:
        ConfigError: the family is unknown or cannot be trained.
    """
    return family_of(model.family).spec(model, parallel or ParallelConfig())


def build_model(
    model: ModelConfig,
    parallel: ParallelConfig | None = None,
    tp: TensorParallel | None = None,
) -> LayerStack:
    """The same as one module, not yet initialised.

    Raises:
        ConfigError: see :func:`spec_of`.
    """
    parallel = parallel or ParallelConfig()
    return LayerStack(spec_of(model, parallel).layers(tp or TensorParallel()), parallel)
