"""Evaluation of tasks during training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.apps.tasks.flags import EvalTasksConfig, resolve_eval_tasks
from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver


class TasksFeature(Feature):
    sections = {"tasks": EvalTasksConfig}
    needs = ("adapters", "evaluation", "instruction", "raw_text", "retro")

    def resolve(self, parts: dict[str, Any], processes: int, resolver: ConfigResolver) -> None:
        interval, length = parts["training"].eval_interval, parts["model"].seq_length
        parts["tasks"] = resolve_eval_tasks(parts["tasks"], interval, length, resolver)

    def begin(self, context: Any) -> None:
        if context.config.section(EvalTasksConfig).eval_tasks:
            from megatron.apps.tasks.during_training import EvalTasks
            from megatron.training.context import Order

            context.add(Order.EVALUATE, EvalTasks(context.config, context.run.tokenizer))

    def missing_evaluation(self, config: Any, kinds: Sequence[str]) -> str | None:
        due = config.section(EvalTasksConfig).eval_tasks and not any(
            kind.startswith("task ") for kind in kinds
        )
        return "tasks" if due else None


FEATURE = TasksFeature()
