"""Unattended runs: hangs, replicas, anomalies, spikes, stragglers, restarts."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver, Settings
from megatron.features.resilience.flags import ResilienceConfig


class ResilienceFeature(Feature):
    training_flags = (ResilienceConfig,)
    sections = {"resilience": ResilienceConfig}

    def complete(self, settings: Settings, run_of: Callable[[Settings], Any]) -> Settings:
        if "inprocess_restart" not in settings:
            return settings
        from megatron.features.resilience.unattended.restarted import from_own_checkpoint

        return from_own_checkpoint(settings)

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        config.section(ResilienceConfig).check(config.checkpoint.save, processes, resolver)

    def start(self, settings: Settings, processes: int) -> int:
        wanted = settings.get("inprocess_restart")
        if wanted is None or not wanted.value or "explain_config" in settings:
            return processes
        from megatron.features.resilience.start import guarded

        return guarded(settings, processes)

    def watch(self, config: Any) -> AbstractContextManager[Any]:
        from megatron.features.resilience.watchdog import watchdog_of

        return watchdog_of(config)

    def begin(self, context: Any) -> None:
        from megatron.features.resilience.generation import current

        generation = current()
        if generation is not None:
            context.started = generation.started

    def before_load(self, context: Any) -> None:
        if context.config.section(ResilienceConfig).non_persistent_save_interval is None:
            return
        from megatron.features.resilience.unattended.node_memory import NodeCheckpoints
        from megatron.training.context import Order

        saves = NodeCheckpoints(context.engine, context.check)
        context.source = saves.newest(context.on_disk)
        context.add(Order.SAVE_IN_MEMORY, saves)

    def ready(self, context: Any) -> None:
        from megatron.features.resilience.unattended.callbacks import add_callbacks

        add_callbacks(context, elastic="TORCHELASTIC_RUN_ID" in os.environ)


FEATURE = ResilienceFeature()
