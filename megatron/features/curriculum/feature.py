"""Samples in the order of their difficulty, and growing sequence lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver
from megatron.features.curriculum.flags import CurriculumConfig, sequence_lengths, token_dropping


class CurriculumFeature(Feature):
    sections = {"curriculum": CurriculumConfig}
    json_sections = tuple(field.name for field in dataclasses.fields(CurriculumConfig))

    def data_kind(self, section: str) -> Any:
        from megatron.features.curriculum.order import KIND

        return KIND

    def check_json(self, sections: Mapping[str, str]) -> None:
        CurriculumConfig(**sections)

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        section = token_dropping(config.section(CurriculumConfig))
        resolver.check(
            section is None or any(getattr(each, "random_ltd", False) for each in config.sections),
            f"{section and section.path} is enabled, but layers drop tokens with --random-ltd "
            "only: give the flag, or set enabled to false",
        )

    def why_eager(self, config: Any, automatic: bool) -> str | None:
        if not automatic or sequence_lengths(config.section(CurriculumConfig)) is None:
            return None
        return "every sequence length of the curriculum would be compiled"


FEATURE = CurriculumFeature()
