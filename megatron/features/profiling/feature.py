"""Recording of steps, for tables and for Perfetto."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature


class Profiling(Feature):
    after = ("run_record",)

    def ready(self, context: Any) -> None:
        options = context.config.profiling
        if not (options.profile or options.record_memory_history):
            return
        from megatron.features.profiling.callback import profiling
        from megatron.training.context import Order

        for callback in profiling(context.config, context.engine, context.origin.iteration):
            context.add(Order.PROFILE, callback)


FEATURE = Profiling()
