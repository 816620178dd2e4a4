"""Evaluation tasks while a model trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.config.features import Feature


class Tasks(Feature):
    def begin(self, context: Any) -> None:
        if context.config.tasks.eval_tasks:
            from megatron.apps.tasks.during_training import EvalTasks
            from megatron.training.context import Order

            context.add(Order.EVALUATE, EvalTasks(context.config, context.run.tokenizer))

    def missing_evaluation(self, config: Any, kinds: Sequence[str]) -> str | None:
        due = config.tasks.eval_tasks and not any(kind.startswith("task ") for kind in kinds)
        return "tasks" if due else None


FEATURE = Tasks()
