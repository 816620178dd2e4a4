"""Run lengths given as a number of epochs, which are passes over the training data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import Settings
from megatron.features.epochs.flags import EpochsFlags


class EpochsFeature(Feature):
    flag_parts = {"batch": EpochsFlags}

    def complete(self, settings: Settings, run_of: Callable[[Settings], Any]) -> Settings:
        from megatron.config.training import RUN_LENGTHS

        if "epochs" not in settings or {"skip_train", *RUN_LENGTHS} & settings.keys():
            return settings
        from megatron.features.epochs.passes import with_epochs

        return with_epochs(settings, run_of)


FEATURE = EpochsFeature()
