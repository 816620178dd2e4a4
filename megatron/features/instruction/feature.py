"""Fine-tuning on instructions and conversations."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature
from megatron.features.instruction.flags import InstructionConfig


class InstructionFeature(Feature):
    sections = {"instruction": InstructionConfig}

    def data_kind(self, section: str) -> Any:
        from megatron.features.instruction.kind import KIND

        return KIND


FEATURE = InstructionFeature()
