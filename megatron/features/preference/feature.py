"""Training on preferences: DPO and its kin, KTO, reward models."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature
from megatron.features.preference.flags import PreferenceConfig


class PreferenceFeature(Feature):
    sections = {"preference": PreferenceConfig}

    def data_kind(self, section: str) -> Any:
        from megatron.features.preference.kind import KIND

        return KIND


FEATURE = PreferenceFeature()
