"""Optimizers next to the core's AdamW and SGD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver
from megatron.features.optimizers.flags import OptimizersConfig


class OptimizersFeature(Feature):
    sections = {"optimizers": OptimizersConfig}
    training_flags = (OptimizersConfig,)
    optimizers = {
        "muon": ("momentum_buffer", "exp_avg", "exp_avg_sq"),
        "lion": ("exp_avg",),
    }

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        config.section(OptimizersConfig).check(config, resolver)

    def optimizer(self, config: Any, trained: Mapping[Any, str], mesh: Any) -> Any:
        if config.optimizer.optimizer not in self.optimizers:
            return None
        from megatron.features.optimizers.build import plan

        return plan(config, trained, mesh)

    def built(self, engine: Any) -> None:
        if engine.config.optimizer.optimizer == "muon":
            from megatron.features.optimizers.build import attach

            attach(engine)


FEATURE = OptimizersFeature()
