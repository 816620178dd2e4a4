"""The length of a run as passes over its data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import Settings
from megatron.config.training import RUN_LENGTHS


class EpochsFeature(Feature):
    def complete(self, settings: Settings, run_of: Callable[[Settings], Any]) -> Settings:
        if "epochs" not in settings or {"skip_train", *RUN_LENGTHS} & settings.keys():
            return settings
        from megatron.features.epochs.passes import with_epochs

        return with_epochs(settings, run_of)


FEATURE = EpochsFeature()
