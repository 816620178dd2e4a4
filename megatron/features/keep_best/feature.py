"""The best evaluation of a run: its checkpoint, and the end without a better one."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature


class KeepBest(Feature):
    after = ("run_record",)

    def ready(self, context: Any) -> None:
        options = context.config.checkpoint
        patience = context.config.training.early_stopping_patience
        if not options.keep_best and patience is None:
            return
        from megatron.features.keep_best.callback import BestEvaluation
        from megatron.training.context import Order

        best = BestEvaluation(
            context.checkpoints,
            context.mesh,
            options.save,
            options.keep_best,
            patience,
            context.origin.iteration,
        )
        context.add(Order.FOLLOW, best)


FEATURE = KeepBest()
