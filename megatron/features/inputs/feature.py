"""Checkpoints keep what a run began from, and a run that continues compares it."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature


class InputsFeature(Feature):
    def before_engine(self, context: Any) -> None:
        if context.source is None and not context.config.checkpoint.save:
            return
        from megatron.features.inputs.compared import INPUTS, compared_inputs

        inputs, context.changed = compared_inputs(context.config, context.source)
        context.notes |= {INPUTS: inputs} if inputs else {}


FEATURE = InputsFeature()
