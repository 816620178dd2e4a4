"""Optimizers in addition to the core's AdamW and SGD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver
from megatron.features.optimizers.flags import OptimizersConfig
from megatron.features.optimizers.table import OPTIMIZERS


class OptimizersFeature(Feature):
    sections = {"optimizers": OptimizersConfig}
    training_flags = (OptimizersConfig,)
    optimizers = {name: entry.states for name, entry in OPTIMIZERS.items()}

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        config.section(OptimizersConfig).check(config, resolver)

    def optimizer(self, config: Any, trained: Mapping[Any, str], mesh: Any) -> Any:
        if not config.section(OptimizersConfig).updates(config.optimizer.optimizer):
            return None
        from megatron.features.optimizers.build import plan

        return plan(config, trained, mesh)

    def built(self, engine: Any) -> None:
        config = engine.config
        if config.section(OptimizersConfig).updates(config.optimizer.optimizer):
            from megatron.features.optimizers.build import attach

            attach(engine)


FEATURE = OptimizersFeature()
