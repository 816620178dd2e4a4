"""Unattended runs: hangs, replicas, anomalies, spikes, stragglers, restarts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver, Settings
from megatron.features.resilience.flags import ResilienceConfig


class ResilienceFeature(Feature):
    sections = {"resilience": ResilienceConfig}

    def complete(self, settings: Settings, run_of: Callable[[Settings], Any]) -> Settings:
        if "inprocess_restart" not in settings:
            return settings
        from megatron.features.resilience.unattended.restarted import from_own_checkpoint

        return from_own_checkpoint(settings)

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        config.section(ResilienceConfig).check(config.checkpoint.save, processes, resolver)


FEATURE = ResilienceFeature()
