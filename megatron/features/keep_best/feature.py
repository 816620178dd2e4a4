"""Keeping the checkpoint with the best evaluation, and early stopping."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver
from megatron.features.keep_best.flags import KeepBestFlags, PatienceFlags, check_evaluations


class KeepBest(Feature):
    after = ("older_checkpoints", "run_record")
    flag_parts = {"checkpoint": KeepBestFlags, "training": PatienceFlags}

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        check_evaluations(config, resolver)

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
