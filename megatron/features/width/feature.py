"""Feature for maximal update parametrisation (muP): a narrow model's hyperparameters for a wide
one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver
from megatron.features.width.flags import WidthConfig


class WidthFeature(Feature):
    sections = {"width": WidthConfig}
    training_flags = (WidthConfig,)

    def resolve(self, parts: dict[str, Any], processes: int, resolver: ConfigResolver) -> None:
        flags = parts["width"]
        if flags.use_mup:
            parts["model"] = flags.of_network(parts["model"], resolver)

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        flags = config.section(WidthConfig)
        if flags.use_mup:
            flags.check(config, resolver)

    def model(self, spec: Any, config: Any) -> Any:
        if not config.section(WidthConfig).use_mup:
            return spec
        from megatron.features.width.rules import with_initial_weights

        return with_initial_weights(spec, config)

    def update_factors(
        self, config: Any, names: Mapping[Any, str], rules: Mapping[Any, str]
    ) -> Mapping[Any, Any]:
        if not config.section(WidthConfig).use_mup:
            return {}
        from megatron.features.width.rules import update_factors

        return update_factors(config, names, rules)


FEATURE = WidthFeature()
