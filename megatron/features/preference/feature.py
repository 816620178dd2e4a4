"""Feature for training on preferences: DPO and related losses, KTO, reward models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver
from megatron.features.preference.flags import PreferenceConfig


class PreferenceFeature(Feature):
    needs = ("evaluation", "inputs", "instruction")
    after = ("instruction",)
    sections = {"preference": PreferenceConfig}
    heads = {"gpt": ("reward",)}

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        config.section(PreferenceConfig).check(resolver)

    def checkpoints(self, config: Any) -> dict[str, str | None]:
        return {"--reference-checkpoint": config.section(PreferenceConfig).reference_checkpoint}

    def inputs(self, config: Any) -> Mapping[str, Mapping[str, str]]:
        flags = config.section(PreferenceConfig)
        if flags.preference is None:
            return {}
        from megatron.features.inputs.compared import model_input, text_inputs
        from megatron.features.instruction.flags import InstructionConfig
        from megatron.features.preference.reference import reference_checkpoint

        models: dict[str, Mapping[str, str]] = {}
        if flags.needs_reference:
            reference, flag = reference_checkpoint(config)
            models["reference model"] = model_input(flag.partition(" ")[2], reference)
        return {**models, **text_inputs(config, config.section(InstructionConfig).chat_template)}

    def data_kind(self, section: str) -> Any:
        from megatron.features.preference.kind import KIND

        return KIND

    def network(self, spec: Any, model: Any, parallel: Any) -> Any:
        if model.head != "reward":
            return spec
        from megatron.features.preference.reward_head import with_rewards

        return with_rewards(spec, model)

    def model(self, spec: Any, config: Any) -> Any:
        if config.section(PreferenceConfig).preference is None:
            return spec
        from megatron.features.preference.objective import with_preference

        return with_preference(spec, config)

    def before_engine(self, context: Any) -> None:
        if context.config.section(PreferenceConfig).needs_reference:
            from megatron.features.preference.reference import add_reference

            add_reference(context.run, context.mesh, context.data)

    def ready(self, context: Any) -> None:
        if context.config.section(PreferenceConfig).preference == "kto":
            from megatron.features.preference.objective import compare_ahead

            compare_ahead(context.engine)


FEATURE = PreferenceFeature()
