"""Samples in the order of their difficulty, and growing sequence lengths."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature
from megatron.features.curriculum.flags import CurriculumConfig


class CurriculumFeature(Feature):
    sections = {"curriculum": CurriculumConfig}

    def data_kind(self, section: str) -> Any:
        from megatron.features.curriculum.kind import KIND

        return KIND


FEATURE = CurriculumFeature()
