"""Fine-tuning on instructions and conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.config.features import Feature
from megatron.features.instruction.flags import InstructionConfig


class InstructionFeature(Feature):
    needs = ("evaluation", "inputs", "raw_text")
    sections = {"instruction": InstructionConfig}

    def inputs(self, config: Any) -> Mapping[str, Mapping[str, str]]:
        from megatron.features.inputs.compared import text_inputs

        flags = config.section(InstructionConfig)
        return text_inputs(config, flags.chat_template) if flags.sft else {}

    def data_kind(self, section: str) -> Any:
        from megatron.features.instruction.examples import KIND

        return KIND

    def model(self, spec: Any, config: Any) -> Any:
        if not config.section(InstructionConfig).sft:
            return spec
        from megatron.features.instruction.objective import with_instruction

        return with_instruction(spec, config)

    def before_engine(self, context: Any) -> None:
        if context.data.weighed:
            from megatron.features.instruction.example_checks import warn_of_examples

            warn_of_examples(context.run, context.data)

    def answer_ends(self, train: Any, tokenizer: Any, of_base: Sequence[int]) -> Any:
        from megatron.features.instruction.example_checks import answer_ends

        return answer_ends(train, tokenizer, of_base)


FEATURE = InstructionFeature()
