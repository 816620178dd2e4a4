"""Training of a student on the probabilities of a teacher."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature


class Distillation(Feature):
    after = ("instruction", "preference")

    def model(self, spec: Any, config: Any) -> Any:
        if not config.distillation.kd:
            return spec
        from megatron.features.distillation.objective import with_teacher

        return with_teacher(spec, config)

    def before_engine(self, context: Any) -> None:
        if context.config.distillation.kd:
            from megatron.features.distillation.callback import Distillation
            from megatron.training.context import Order

            context.add(Order.TEACH, Distillation(context.run))

    def ready(self, context: Any) -> None:
        if context.config.distillation.kd:
            from megatron.features.distillation.callback import Distillation

            teaching = context.added(Distillation)
            teaching.start(
                context.engine, context.data, context.plan, context.origin.consumed_samples
            )
            context.report.extra_flops.append(teaching.flops)


FEATURE = Distillation()
