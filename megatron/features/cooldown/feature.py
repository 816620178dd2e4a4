"""Feature that decays the learning rate to its minimum from any checkpoint of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import Settings
from megatron.features.cooldown.flags import CooldownConfig


class CooldownFeature(Feature):
    sections = {"cooldown": CooldownConfig}
    training_flags = (CooldownConfig,)

    def complete(self, settings: Settings, run_of: Callable[[Settings], Any]) -> Settings:
        length = settings.get("cooldown_iters")
        if length is None or length.value < 1:  # refused by the flag's bounds
            return settings
        from megatron.features.cooldown.branch import with_cooldown

        return with_cooldown(settings)


FEATURE = CooldownFeature()
