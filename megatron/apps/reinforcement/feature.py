"""Feature that trains a GPT by reinforcement learning on its own completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.apps.reinforcement import settings
from megatron.apps.reinforcement.flags import ReinforcementConfig
from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver


class ReinforcementFeature(Feature):
    needs = after = ("adapters", "averages", "distillation", "evaluation", "inputs", "instruction",
                     "preference", "resilience", "retro")  # fmt: skip
    sections = {"reinforcement": ReinforcementConfig}
    only_trained = ("value_head.",)

    def resolve(self, parts: dict[str, Any], processes: int, resolver: ConfigResolver) -> None:
        parts["reinforcement"] = settings.resolved(parts["reinforcement"], resolver)

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        settings.check(config.section(ReinforcementConfig), config, resolver)

    def checkpoints(self, config: Any) -> dict[str, str | None]:
        return {"--reward-model": config.section(ReinforcementConfig).reward_model}

    def inputs(self, config: Any) -> Mapping[str, Mapping[str, str]]:
        from megatron.features.inputs.compared import located_model

        return located_model("reward model", config.section(ReinforcementConfig).reward_model)

    def data_kind(self, section: str) -> Any:
        from megatron.apps.reinforcement.data.kind import KIND

        return KIND

    def model(self, spec: Any, config: Any) -> Any:
        if config.section(ReinforcementConfig).rl is None:
            return spec
        if config.section(ReinforcementConfig).rl == "distill":
            from megatron.apps.reinforcement.distill import with_texts_taught

            return with_texts_taught(spec, config)
        from megatron.apps.reinforcement.exact.head import drawn_numbers
        from megatron.apps.reinforcement.exact.model import with_pages
        from megatron.apps.reinforcement.objective import with_reinforcement

        return with_reinforcement(with_pages(spec), config, drawn_numbers)

    def built(self, engine: Any) -> None:
        if engine.config.section(ReinforcementConfig).needs_reference:
            from megatron.apps.reinforcement.reference import keep_reference

            keep_reference(engine)

    def load(self, engine: Any, source: Any, fresh: Sequence[str], continues: bool) -> Any:
        if not engine.config.section(ReinforcementConfig).has_values:
            return None
        from megatron.apps.reinforcement.values import load_with_value_head

        return load_with_value_head(engine, source, fresh)

    def check_source(self, config: Any, source: Any) -> None:
        if config.section(ReinforcementConfig).has_values and source is not None:
            from megatron.apps.reinforcement.values import check_continued

            if source.continues:
                check_continued(source.found.open(verify=False))

    def before_engine(self, context: Any) -> None:
        if context.config.section(ReinforcementConfig).rl is not None:
            from megatron.apps.reinforcement.start import prepare

            prepare(context)

    def ready(self, context: Any) -> None:
        options, reference = context.config.section(ReinforcementConfig), None
        if options.rl is None:
            return
        if options.needs_reference:
            from megatron.apps.reinforcement.reference import ReferenceModel
            from megatron.training.context import Order

            reference = ReferenceModel(context.engine, context.mesh)
            context.add(Order.TEACH, reference)
        from megatron.apps.reinforcement.start import start_loop

        loop = start_loop(context, reference)
        if options.rl == "distill":
            from megatron.apps.reinforcement.distill import start_teacher

            start_teacher(context, loop)


FEATURE = ReinforcementFeature()
