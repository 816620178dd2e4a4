"""Evaluation tasks while a model trains."""

from __future__ import annotations

from typing import Any

from megatron.apps.tasks.flags import EvalTasksConfig, resolve_eval_tasks
from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver


class TasksFeature(Feature):
    sections = {"tasks": EvalTasksConfig}

    def resolve(self, parts: dict[str, Any], processes: int, resolver: ConfigResolver) -> None:
        interval, length = parts["training"].eval_interval, parts["model"].seq_length
        parts["tasks"] = resolve_eval_tasks(parts["tasks"], interval, length, resolver)


FEATURE = TasksFeature()
