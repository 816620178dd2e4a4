"""Groups of parameters whose learning rate and weight decay flags select by name."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist
from torch import nn

from megatron.config import ConfigError, OptimizerConfig
from megatron.engine.update.optimizer import Factors, Names
from megatron.features.parameter_groups.flags import VOCABULARY, ParameterGroupFlags
from megatron.parallel.mesh import Mesh
from megatron.parallel.shard import shard_of

_SHOWN = 3
"""Maximum number of parameter names shown for a group."""


def with_flags(
    factors: Mapping[nn.Parameter, Factors], names: Names, options: ParameterGroupFlags
) -> Mapping[nn.Parameter, Factors]:
    """Return the factors of every parameter, multiplied by those that flags give. Return an empty
    dictionary if no rank has any factors."""
    if not factors and not any(_patterns(options)):
        return {}
    return {
        param: _with_flags(factors.get(param, Factors()), name, shard_of(param).decays, options)
        for param, name in names.items()
    }


def _with_flags(factors: Factors, name: str, decays: bool, options: ParameterGroupFlags) -> Factors:
    decoupled = options.decoupled(name)
    if decoupled:  # as in Megatron, replaces a rate derived from --lr
        factors = factors._replace(rate=1.0)
    return factors.times(Factors(options.lr_factor(name), options.wd_factor(name)))._replace(
        decoupled=decoupled, decays=decays or (options.decays_qk_norms and _is_qk_norm(name))
    )


def _is_qk_norm(name: str) -> bool:
    return name.endswith((".q_norm.weight", ".k_norm.weight"))


def _patterns(options: ParameterGroupFlags) -> Iterator[tuple[str, Callable[[str], bool]]]:
    """Yield each flag that selects parameters by name, with a predicate on names."""
    for flag, groups in (("--lr-group", options.lr_groups), ("--wd-group", options.wd_groups)):
        for pattern in groups:
            yield f"{flag} {pattern}", lambda name, p=pattern: fnmatchcase(name, p)  # type: ignore[misc]
    if options.decoupled_lr is not None:
        words = f"--decoupled-lr {options.decoupled_lr:g} ({', '.join(VOCABULARY)})"
        yield words, options.decoupled
    if options.decays_qk_norms:
        yield "--apply-wd-to-qk-layernorm", _is_qk_norm


def check_patterns(names: Names, options: ParameterGroupFlags, mesh: Mesh) -> None:
    """Raise ConfigError if a flag matches no parameter of any stage. Every rank must call it."""
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
    """Return log lines that describe the parameter groups of a model. Every rank must call it."""
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
        assert options.own_rates is not None
        peak, _ = options.own_rates
    decay = f"{options.end_weight_decay * factors.decay:g}" if factors.decays else "none"
    epsilon = "" if factors.epsilon == 1.0 else f", epsilon {options.adam_eps * factors.epsilon:g}"
    some = list(sizes)[:_SHOWN]
    more = f" and {len(sizes) - len(some)} more" if len(sizes) > len(some) else ""
    return (
        f"group of parameters: learning rate {peak * factors.rate:g}, weight decay {decay}{epsilon}"
        f": {sum(sizes.values()):,} in {', '.join(some)}{more}"
    )


def _of_stages(value: Any, mesh: Mesh) -> list[Any]:
    """Return the values of all pipeline stages, in order."""
    values = [value] * mesh.pipeline.size
    if mesh.pipeline.size > 1:
        dist.all_gather_object(values, value, group=mesh.pipeline.handle)
    return values
