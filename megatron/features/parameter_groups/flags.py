"""Flags for parameters with their own learning rate or weight decay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from megatron.config.features import FlagPart
from megatron.config.flags import NOT_NEGATIVE, POSITIVE, ConfigError, ConfigResolver, Need, option

_DECOUPLED = Need("--decoupled-lr", lambda values: values["decoupled_lr"] is not None)

VOCABULARY = ("embedding.word_embeddings.*", "output_layer.*")
"""Patterns of the canonical names of the token embedding and the output layer."""


@dataclass(frozen=True, kw_only=True)
class ParameterGroupFlags(FlagPart):
    """Groups of parameters."""

    lr_group: tuple[str, ...] = option((), role="schedule")
    """PATTERN=FACTOR: multiply the learning rate of the parameters whose canonical names match the
    pattern (embedding.*=0.1, layers.[01].*=0.5, *.lora_*_b.*=16). The first match applies."""
    decoupled_lr: float | None = option(None, bounds=POSITIVE, role="schedule")
    """Peak learning rate of the token embedding and output layer, on the same schedule as --lr."""
    decoupled_min_lr: float | None = option(
        None, derived="min-lr", bounds=NOT_NEGATIVE, role="schedule", needs=_DECOUPLED
    )
    """Minimum learning rate of the token embedding and the output layer."""
    wd_group: tuple[str, ...] = option((), role="schedule")
    """PATTERN=FACTOR: multiply the weight decay of the matrices whose canonical names match the
    pattern (embedding.*=0 turns it off for embeddings). The first pattern that matches applies.
    Biases and norms have no weight decay."""
    apply_wd_to_qk_layernorm: bool = option(False, role="schedule")
    """Also apply weight decay to norms of queries and keys (--qk-layernorm), as in Qwen3-Next."""
    no_weight_decay_cond_type: str | None = option(
        None, choices=("apply_wd_to_qk_layernorm",), role="schedule"
    )
    """Megatron's earlier spelling of --apply-wd-to-qk-layernorm."""

    @property
    def lr_groups(self) -> dict[str, float]:
        """Learning rate factor of each pattern. Raises ConfigError if a value is malformed."""
        return _factors("--lr-group", self.lr_group)

    @property
    def wd_groups(self) -> dict[str, float]:
        """Weight decay factor of each pattern. Raises ConfigError if a value is malformed."""
        return _factors("--wd-group", self.wd_group)

    def lr_factor(self, name: str) -> float:
        """Return the learning rate factor of the parameter with this canonical name."""
        return _first_match(self.lr_groups, name)

    def wd_factor(self, name: str) -> float:
        """Return the weight decay factor of a parameter that has weight decay."""
        return _first_match(self.wd_groups, name)

    @property
    def decays_qk_norms(self) -> bool:
        """True if the norms of queries and keys have weight decay."""
        return self.apply_wd_to_qk_layernorm or self.no_weight_decay_cond_type is not None

    def decoupled(self, name: str) -> bool:
        """Return whether a parameter's learning rate is ``--decoupled-lr``."""
        return self.decoupled_lr is not None and any(fnmatchcase(name, p) for p in VOCABULARY)

    @property
    def own_rates(self) -> tuple[float, float] | None:
        """Peak and minimum learning rate for ``--decoupled-lr``; None if it is not given."""
        peak = self.decoupled_lr
        return None if peak is None else (peak, self.decoupled_min_lr or 0.0)


def complete(options: Any, resolver: ConfigResolver) -> Any:
    """Return an ``OptimizerConfig`` with the minimum of ``--decoupled-lr`` filled in. Raises
    ConfigError for patterns without factors."""
    flags = ParameterGroupFlags.of(options)
    flags.lr_groups, flags.wd_groups  # noqa: B018  # raise if invalid
    peak = flags.decoupled_lr
    if peak is None:
        return options
    least = resolver.fill("decoupled_min_lr", flags.decoupled_min_lr, options.min_lr, "min-lr")
    for name, value in (("decoupled_min_lr", least), ("lr_warmup_init", options.lr_warmup_init)):
        resolver.check(
            value <= peak,
            f"{resolver.flag(name)} {value:g} is above {resolver.show('decoupled_lr')}",
        )
    return replace(options, decoupled_min_lr=least)


def _factors(flag: str, values: tuple[str, ...]) -> dict[str, float]:
    factors: dict[str, float] = {}
    for value in values:
        pattern, _, factor = value.rpartition("=")
        try:
            factors.setdefault(pattern, float(factor))
        except ValueError:
            pattern = ""
        if not pattern or not 0 <= factors[pattern] < math.inf:
            raise ConfigError(
                f"{flag} {value} must be PATTERN=FACTOR, a pattern of canonical names of "
                "parameters and a factor of at least 0, such as embedding.*=0.1"
            )
    return factors


def _first_match(groups: Mapping[str, float], name: str) -> float:
    return next((f for pattern, f in groups.items() if fnmatchcase(name, pattern)), 1.0)
