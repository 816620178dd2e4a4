"""Learning rate and weight decay for parameters that flags select by name: ``--lr-group``,
``--wd-group``, ``--decoupled-lr`` and ``--apply-wd-to-qk-layernorm``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver
from megatron.features.parameter_groups.flags import ParameterGroupFlags, complete


class ParameterGroups(Feature):
    flag_parts = {"optimizer": ParameterGroupFlags}

    def resolve(self, parts: dict[str, Any], processes: int, resolver: ConfigResolver) -> None:
        parts["optimizer"] = complete(parts["optimizer"], resolver)

    def group_factors(
        self, config: Any, names: Mapping[Any, str], factors: Mapping[Any, Any]
    ) -> Mapping[Any, Any]:
        from megatron.features.parameter_groups.groups import with_flags

        return with_flags(factors, names, config.optimizer)

    def group_lines(
        self, config: Any, names: Mapping[Any, str], factors: Mapping[Any, Any], mesh: Any
    ) -> Sequence[str]:
        from megatron.features.parameter_groups.groups import check_patterns, group_lines

        check_patterns(names, config.optimizer, mesh)
        return group_lines(names, factors, config.optimizer, mesh)


FEATURE = ParameterGroups()
