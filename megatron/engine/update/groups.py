"""Factors of learning rate, weight decay and epsilon of single parameters."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from megatron.config import ConfigError, OptimizerConfig, RunConfig
from megatron.config.features import taking_part
from megatron.config.optimizer import VOCABULARY
from megatron.parallel.mesh import Mesh
from megatron.parallel.shard import shard_of

Names = Mapping[nn.Parameter, str]
"""Canonical name of each parameter that is trained."""
_SHOWN = 3
"""Most names of a group in a line."""


class Factors(NamedTuple):
    """Numbers by which what all parameters share is multiplied for one of them.

    Attributes:
        rate: of the learning rate, its minimum included.
        decay: of the weight decay of a parameter that decays.
        epsilon: of ``--adam-eps``.
        decoupled: whether the learning rate is ``--decoupled-lr``.
        decays: whether the parameter decays; by default matrices do.
    """

    rate: float = 1.0
    decay: float = 1.0
    epsilon: float = 1.0
    decoupled: bool = False
    decays: bool | None = None

    def times(self, other: Factors) -> Factors:
        """Return the products with other factors."""
        return self._replace(
            rate=self.rate * other.rate,
            decay=self.decay * other.decay,
            epsilon=self.epsilon * other.epsilon,
        )


def factors_of(
    names: Names, config: RunConfig, rules: Mapping[nn.Parameter, str] = MappingProxyType({})
) -> dict[nn.Parameter, Factors]:
    """Return the factors of every parameter: those of features, times those of flags; empty, on
    every rank, where neither has any. ``rules``: as of an
    :class:`~megatron.engine.update.optimizer.OptimizerPlan`."""
    factors: dict[nn.Parameter, Factors] = {}
    for feature in taking_part():
        for param, of_feature in feature.update_factors(config, names, rules).items():
            factors[param] = factors.get(param, Factors()).times(of_feature)
    options = config.optimizer
    if not factors and not any(_patterns(options)):
        return {}
    return {
        param: _with_flags(factors.get(param, Factors()), name, shard_of(param).decays, options)
        for param, name in names.items()
    }


def _with_flags(factors: Factors, name: str, decays: bool, options: OptimizerConfig) -> Factors:
    decoupled = options.decoupled(name)
    if decoupled:  # as in Megatron, instead of what follows from --lr
        factors = factors._replace(rate=1.0)
    return factors.times(Factors(options.lr_factor(name), options.wd_factor(name)))._replace(
        decoupled=decoupled, decays=decays or (options.decays_qk_norms and _is_qk_norm(name))
    )


def _is_qk_norm(name: str) -> bool:
    return name.endswith((".q_norm.weight", ".k_norm.weight"))


def _patterns(options: OptimizerConfig) -> Iterator[tuple[str, Callable[[str], bool]]]:
    """Flags that choose parameters by name, and the condition of each."""
    for flag, groups in (("--lr-group", options.lr_groups), ("--wd-group", options.wd_groups)):
        for pattern in groups:
            yield f"{flag} {pattern}", lambda name, p=pattern: fnmatchcase(name, p)  # type: ignore[misc]
    if options.decoupled_lr is not None:
        words = f"--decoupled-lr {options.decoupled_lr:g} ({', '.join(VOCABULARY)})"
        yield words, options.decoupled
    if options.decays_qk_norms:
        yield "--apply-wd-to-qk-layernorm", _is_qk_norm


def check_patterns(names: Names, options: OptimizerConfig, mesh: Mesh) -> None:
    """Raise ConfigError if a flag chooses no parameter of any pipeline stage. Every rank must call
    it."""
    patterns = list(_patterns(options))
    if not patterns:
        return
    matched = [any(map(matches, names.values())) for _, matches in patterns]
    matched = [any(each) for each in zip(*_of_stages(matched, mesh), strict=True)]
    for (flag, _), matches in zip(patterns, matched, strict=True):
        if not matches:
            some = ", ".join(list(names.values())[:4])
            raise ConfigError(
                f"{flag}: no parameter that is trained has such a name; some are "
                f"{some}; tools/inspect_checkpoint.py lists all"
            )


def group_lines(
    names: Names, factors: Mapping[nn.Parameter, Factors], options: OptimizerConfig, mesh: Mesh
) -> list[str]:
    """Lines about the groups of a model's parameters; every rank must call it."""
    if not factors:
        return []
    own = {
        name: (factors[param], math.prod(shard_of(param).canonical_shape))
        for param, name in names.items()
    }
    groups: dict[Factors, dict[str, int]] = defaultdict(dict)
    for stage in _of_stages(own, mesh):
        for name, (each, size) in stage.items():
            groups[each][name] = size
    return [_line(each, groups[each], options) for each in sorted(groups, reverse=True)]


def _line(factors: Factors, sizes: Mapping[str, int], options: OptimizerConfig) -> str:
    peak = options.lr
    if factors.decoupled:
        assert options.decoupled_lr is not None
        peak = options.decoupled_lr
    decay = f"{options.end_weight_decay * factors.decay:g}" if factors.decays else "none"
    epsilon = "" if factors.epsilon == 1.0 else f", epsilon {options.adam_eps * factors.epsilon:g}"
    some = list(sizes)[:_SHOWN]
    more = f" and {len(sizes) - len(some)} more" if len(sizes) > len(some) else ""
    return (
        f"group of parameters: learning rate {peak * factors.rate:g}, weight decay {decay}{epsilon}"
        f": {sum(sizes.values()):,} in {', '.join(some)}{more}"
    )


def _of_stages(value: Any, mesh: Mesh) -> list[Any]:
    """The value of each pipeline stage."""
    values = [value] * mesh.pipeline.size
    if mesh.pipeline.size > 1:
        dist.all_gather_object(values, value, group=mesh.pipeline.handle)
    return values
