"""Fine-tuning on instructions and conversations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config.features import Feature
from megatron.features.instruction.flags import InstructionConfig


class InstructionFeature(Feature):
    sections = {"instruction": InstructionConfig}

    def inputs(self, config: Any) -> Mapping[str, Mapping[str, str]]:
        from megatron.run.inputs import text_inputs

        flags = config.section(InstructionConfig)
        return text_inputs(config, flags.chat_template) if flags.sft else {}

    def data_kind(self, section: str) -> Any:
        from megatron.features.instruction.kind import KIND

        return KIND


FEATURE = InstructionFeature()
