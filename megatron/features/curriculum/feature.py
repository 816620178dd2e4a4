"""Feature for curriculum learning: samples ordered by difficulty, and growing sequence lengths."""

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
        from megatron.features.curriculum.packing.section import packing_of

        packing_of(CurriculumConfig(**sections))

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        section = token_dropping(config.section(CurriculumConfig))
        resolver.check(
            section is None or any(getattr(each, "random_ltd", False) for each in config.sections),
            f"{section and section.path} is enabled, but layers drop tokens with --random-ltd "
            "only: give the flag, or set enabled to false",
        )
        lengths = sequence_lengths(config.section(CurriculumConfig))
        resolver.check(
            lengths is None or config.model.family not in ("t5", "biencoder"),
            f"{lengths and lengths.name} cannot cut samples of the family {config.model.family}, "
            "whose parts belong together: remove it",
        )
        from megatron.features.curriculum.packing.section import check, packing_of

        packing = packing_of(config.section(CurriculumConfig))
        if packing is not None:
            check(config, packing)

    def why_eager(self, config: Any, automatic: bool) -> str | None:
        if automatic and _packs(config):
            return "every number of samples and tokens in a bin would be compiled"
        if automatic and sequence_lengths(config.section(CurriculumConfig)) is not None:
            return "every sequence length of the curriculum would be compiled"
        return None

    def model(self, spec: Any, config: Any) -> Any:
        examples = any(getattr(section, "sft", False) for section in config.sections)
        if examples or not _packs(config):
            return spec  # finetuning sets its own weights
        from megatron.features.curriculum.packing.data import with_weights

        return with_weights(spec)

    def ready(self, context: Any) -> None:
        from megatron.features.curriculum.packing.section import packing_of

        packing = packing_of(context.config.section(CurriculumConfig))
        if packing is None:
            return
        from megatron.features.curriculum.packing.data import StepsOfBins
        from megatron.training.context import Order

        context.add(Order.TEACH, StepsOfBins(packing, context))


def _packs(config: Any) -> bool:
    from megatron.features.curriculum.packing.section import packing_of

    return packing_of(config.section(CurriculumConfig)) is not None


FEATURE = CurriculumFeature()
