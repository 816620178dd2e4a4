"""Retro: models that read the neighbours of their samples."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature
from megatron.features.retro.flags import RetroDataConfig


class RetroFeature(Feature):
    sections = {"retro": RetroDataConfig}
    families = ("retro",)

    def family(self, name: str) -> Any:
        from megatron.features.retro.family import FAMILY

        return FAMILY


FEATURE = RetroFeature()
