"""Evaluation of tasks during training."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatron.apps.tasks.flags import EvalTasksConfig
from megatron.apps.tasks.harness.command import require_harness
from megatron.apps.tasks.report import TaskResult
from megatron.apps.tasks.zeroshot.tasks import TASKS, prepare
from megatron.config import ConfigError, RunConfig
from megatron.engine.train_engine import ModelEngine
from megatron.features.raw_text.flags import RawTextConfig
from megatron.tokenizer import Tokenizer
from megatron.training.registry import TASK_COSTS
from megatron.training.trainer import Callback, Trainer


class EvaluatedTask(Protocol):
    """Task whose files have been read, such as
    :class:`megatron.apps.tasks.zeroshot.tasks.ZeroShotTask`."""

    name: str

    def evaluate(self, engine: ModelEngine, micro_batch_size: int) -> TaskResult: ...


@dataclass(frozen=True)
class TaskEvaluation:
    """Result of a task after ``iteration`` steps. ``since`` is the number of seconds between the
    end of the previous evaluations and the start of these."""

    iteration: int
    result: TaskResult
    since: float

    @property
    def kind(self) -> str:
        """Name under which the log writers record these values."""
        return f"task {self.result.name}"

    def line(self) -> str:
        """Return the console line. It gives the evaluation's cost as a percentage of the time since
        the last evaluation."""
        result = self.result
        fields = [
            f"{self.kind} at iteration {self.iteration}",
            *(f"{name.replace('_', ' ')}: {value:.6E}" for name, value in result.metrics.items()),
            f"examples: {result.examples}",
            f"tokens per second: {result.tokens_per_second:.1f}",
            f"elapsed: {result.seconds:.2f} s, {100 * self._share:.1f}% of the time since "
            "the last evaluation",
        ]
        return " " + " | ".join(fields) + " |"

    def row(self) -> dict[str, float | None]:
        """Return the values by name, for the log writers."""
        result = self.result
        costs = result.examples, result.seconds, result.tokens_per_second, self._share
        return {**result.metrics, **dict(zip(TASK_COSTS, costs, strict=True))}

    @property
    def _share(self) -> float:
        return self.result.seconds / max(self.since, 1e-9)


class EvalTasks(Callback):
    """Callback for ``--eval-tasks``: evaluates the tasks every ``--eval-tasks-interval`` iterations
    and at the end. The files are read and tokenized when it is created. Raises ConfigError or
    OSError if a task is unknown or its file cannot be used."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        self._interval = config.section(EvalTasksConfig).eval_tasks_interval or 0
        self._micro_batch_size = config.training.micro_batch_size
        self._tasks = prepared_tasks(config, tokenizer)
        self._since = time.perf_counter()

    def __enter__(self) -> EvalTasks:
        self._since = time.perf_counter()
        return self

    def evaluate(self, trainer: Trainer, last: bool) -> None:
        """Evaluate all tasks if an evaluation is due, or if this is the ``last`` iteration."""
        if not last and trainer.iteration % self._interval:
            return
        trainer.settle()
        before = time.perf_counter() - self._since
        for task in self._tasks:
            result = task.evaluate(trainer.engine, self._micro_batch_size)
            trainer.report(TaskEvaluation(trainer.iteration, result, before))
        self._since = time.perf_counter()


def prepared_tasks(config: RunConfig, tokenizer: Tokenizer) -> list[EvaluatedTask]:
    """Return the tasks of ``--eval-tasks``. ``wikitext`` and ``lambada`` read their own file
    formats. Any other NAME=FILE is a file of documents, and any other name without a file is a task
    of lm-eval. Raises ConfigError or OSError, naming the task and its file, if a task cannot be
    read."""
    tasks: list[EvaluatedTask] = []
    for name, word in config.section(EvalTasksConfig).files.items():
        if word is None and name not in TASKS:
            require_harness()
            from megatron.apps.tasks.harness.tasks import HarnessTask

            tasks.append(
                HarnessTask(name, config.section(EvalTasksConfig).eval_tasks_path, tokenizer)
            )
            continue
        path = Path(word) if word is not None else _in_folder(name, config.section(EvalTasksConfig))
        if not path.is_file():
            raise ConfigError(f"--eval-tasks {name}={path}: there is no such file")
        kind = name if name in TASKS else "json"
        if kind == "json" and path.suffix not in (".json", ".jsonl"):
            raise ConfigError(
                f"--eval-tasks {name}={path}: {name} is none of {', '.join(TASKS)}, and so the "
                "name of a file of documents, which must end in .json or .jsonl"
            )
        raw, model = config.section(RawTextConfig), config.model
        stride = config.section(EvalTasksConfig).eval_tasks_stride or model.seq_length
        tasks.append(prepare(kind, [path], tokenizer, model, stride, True, raw=raw, name=name))
    return tasks


def _in_folder(name: str, config: EvalTasksConfig) -> Path:
    """Return the file in ``--eval-tasks-path`` for a task that is given without a file."""
    if config.eval_tasks_path is None:
        raise ConfigError(
            f"--eval-tasks {name} needs --eval-tasks-path, the folder with its file; or write "
            f"{name}=FILE"
        )
    folder = Path(config.eval_tasks_path)
    if not folder.is_dir():
        raise ConfigError(f"--eval-tasks-path {folder} is not a folder")
    fitting = sorted(p for p in folder.iterdir() if p.name.startswith(name) and p.is_file())
    if len(fitting) != 1:
        what = ", ".join(path.name for path in fitting) or "none"
        raise ConfigError(
            f"--eval-tasks {name}: --eval-tasks-path {folder} must have one file whose name begins "
            f"with {name!r}, and has {what}; write {name}=FILE"
        )
    return fitting[0]
