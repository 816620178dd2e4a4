"""Recording of training steps, for time tables and for Perfetto."""

from __future__ import annotations

from typing import Any

from megatron.apps.profiling.flags import ProfilingConfig, resolve_profiling
from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver


class ProfilingFeature(Feature):
    needs = ("measured_peak",)
    after = ("run_record",)
    training_flags = (ProfilingConfig,)
    sections = {"profiling": ProfilingConfig}

    def resolve(self, parts: dict[str, Any], processes: int, resolver: ConfigResolver) -> None:
        length, save = parts["training"].train_iters, parts["checkpoint"].save
        flags = parts["profiling"]
        parts["profiling"] = resolve_profiling(flags, processes, length, save, resolver)

    def ready(self, context: Any) -> None:
        options = context.config.section(ProfilingConfig)
        if not (options.profile or options.record_memory_history):
            return
        from megatron.apps.profiling.callback import profiling
        from megatron.training.context import Order

        for callback in profiling(context.config, context.engine, context.origin.iteration):
            context.add(Order.PROFILE, callback)


FEATURE = ProfilingFeature()
