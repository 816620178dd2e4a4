"""Feature that trains a student on the probabilities of a teacher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver
from megatron.features.distillation.flags import DistillationConfig


class DistillationFeature(Feature):
    needs = ("adapters", "evaluation", "inputs")
    after = ("instruction", "preference")
    sections = {"distillation": DistillationConfig}

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        config.section(DistillationConfig).check(resolver)

    def checkpoints(self, config: Any) -> dict[str, str | None]:
        return {"--load-teacher": config.section(DistillationConfig).load_teacher}

    def inputs(self, config: Any) -> Mapping[str, Mapping[str, str]]:
        from megatron.features.inputs.compared import located_model

        return located_model("teacher", config.section(DistillationConfig).load_teacher)

    def folders(self, config: Any) -> dict[str, str | None]:
        return {"--kd-cache": config.section(DistillationConfig).kd_cache}

    def model(self, spec: Any, config: Any) -> Any:
        if not config.section(DistillationConfig).kd:
            return spec
        from megatron.features.distillation.objective import with_teacher

        return with_teacher(spec, config)

    def before_engine(self, context: Any) -> None:
        if context.config.section(DistillationConfig).kd:
            from megatron.features.distillation.callback import Distillation
            from megatron.training.context import Order

            context.add(Order.TEACH, Distillation(context.run))

    def ready(self, context: Any) -> None:
        if context.config.section(DistillationConfig).kd:
            from megatron.features.distillation.callback import Distillation

            teaching = context.added(Distillation)
            teaching.start(
                context.engine, context.data, context.plan, context.origin.consumed_samples
            )
            context.report.extra_flops.append(teaching.flops)


FEATURE = DistillationFeature()
