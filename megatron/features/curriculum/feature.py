"""Samples in the order of their difficulty, and growing sequence lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.config.features import Feature
from megatron.features.curriculum.flags import CurriculumConfig, sequence_lengths


class CurriculumFeature(Feature):
    sections = {"curriculum": CurriculumConfig}
    json_sections = tuple(field.name for field in dataclasses.fields(CurriculumConfig))

    def data_kind(self, section: str) -> Any:
        from megatron.features.curriculum.order import KIND

        return KIND

    def check_json(self, sections: Mapping[str, str]) -> None:
        CurriculumConfig(**sections)

    def why_eager(self, config: Any, automatic: bool) -> str | None:
        if not automatic or sequence_lengths(config.section(CurriculumConfig)) is None:
            return None
        return "every sequence length of the curriculum would be compiled"


FEATURE = CurriculumFeature()
