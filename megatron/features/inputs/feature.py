"""Checkpoints keep what a run began from, and a run that continues compares it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.config.features import Feature


class InputsFeature(Feature):
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
