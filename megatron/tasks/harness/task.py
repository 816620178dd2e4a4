"""A task of lm-eval that can be evaluated again and again, beside those of zero-shot evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import lm_eval

from megatron.engine.train_engine import ModelEngine
from megatron.tasks.harness.model import HarnessModel
from megatron.tasks.harness.scoring import TextScorer
from megatron.tasks.harness.tasks import load_tasks
from megatron.tasks.report import TaskResult
from megatron.tokenizer import Tokenizer

_NO_FILTER = "none"


class HarnessTask:
    """A task or a group of lm-eval's with its documents, read once. Raises ConfigError if it is
    unknown, or its data are not on this machine."""

    def __init__(self, name: str, include_path: str | None, tokenizer: Tokenizer) -> None:
        self.name, self._tokenizer = name, tokenizer
        self._manager, self._tasks = load_tasks([name], include_path, None, "--eval-tasks")

    def evaluate(
        self,
        engine: ModelEngine,
        micro_batch_size: int,
        progress: Callable[[int], object] | None = None,
    ) -> TaskResult:
        """lm-eval's metrics, on the main process; every rank must call it. Those of a group's tasks
        begin with the task's name. No generator of random numbers is set. Raises ConfigError if the
        task generates text."""
        model = HarnessModel(TextScorer(engine, self._tokenizer, micro_batch_size))
        start = time.perf_counter()
        results = lm_eval.simple_evaluate(
            model,
            tasks=list(self._tasks),
            task_manager=self._manager,
            bootstrap_iters=0,
            log_samples=False,
            random_seed=None,
            numpy_random_seed=None,
            torch_random_seed=None,
        )
        seconds, tokens = time.perf_counter() - start, model.scorer.speed.tokens
        if results is None:  # lm-eval has them on the main process only
            return TaskResult(self.name, {}, 0, tokens, seconds)
        examples = sum(count["effective"] for count in results["n-samples"].values())
        return TaskResult(self.name, self._metrics(results["results"]), examples, tokens, seconds)

    def _metrics(self, results: dict[str, dict[str, Any]]) -> dict[str, float]:
        found = {}
        for task, values in results.items():
            for key, value in values.items():
                metric, comma, filtered = key.partition(",")
                if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                    continue
                words = [*([] if task == self.name else [task]), metric]
                words += [] if filtered == _NO_FILTER else [filtered]
                found["_".join(words)] = float(value)
        return found
