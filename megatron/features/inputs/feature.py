"""Feature that records the inputs of a run in its checkpoints, and compares them on resume."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.config.features import Feature
from megatron.features.inputs.flags import ChangedDataFlags


class InputsFeature(Feature):
    flag_parts = {"checkpoint": ChangedDataFlags}

    def before_engine(self, context: Any) -> None:
        if context.source is None and not context.config.checkpoint.save:
            return
        from megatron.features.inputs.compared import INPUTS, compared_inputs

        inputs, context.changed = compared_inputs(context.config, context.source)
        context.notes |= {INPUTS: inputs} if inputs else {}

    def changed_data(self, config: Any, source: Any, files: Sequence[Any]) -> Sequence[str]:
        from megatron.features.inputs.data_files import changed_data

        return changed_data(source, config, files)


FEATURE = InputsFeature()
