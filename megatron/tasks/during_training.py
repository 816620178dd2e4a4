"""Tasks that are evaluated on the model in training."""

from __future__ import annotations

import time
from pathlib import Path

from megatron.config import ConfigError, EvalTasksConfig, RunConfig
from megatron.config.kinds.raw_text import RawTextConfig
from megatron.tasks.zeroshot import TASKS, ZeroShotTask, prepare
from megatron.tokenizer import Tokenizer
from megatron.training.metrics import TaskEvaluation
from megatron.training.trainer import Callback, Trainer


class EvalTasks(Callback):
    """``--eval-tasks``: every ``--eval-tasks-interval`` iterations and at the end. The files are
    read and tokenized once, before the first step. Raises ConfigError or OSError if a task is not
    known or its file cannot be used."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        self._interval = config.tasks.eval_tasks_interval or 0
        self._micro_batch_size = config.training.micro_batch_size
        self._tasks = [
            _prepared(name, path, config, tokenizer)
            for name, path in files_of(config.tasks).items()
        ]
        self._since = time.perf_counter()

    def __enter__(self) -> EvalTasks:
        self._since = time.perf_counter()
        return self

    def evaluate(self, trainer: Trainer, last: bool) -> None:
        """Evaluates if it is due."""
        if not last and trainer.iteration % self._interval:
            return
        trainer.settle()
        before = time.perf_counter() - self._since
        for task in self._tasks:
            result = task.evaluate(trainer.engine, self._micro_batch_size)
            evaluation = TaskEvaluation(
                trainer.iteration,
                result.name,
                result.metrics,
                result.examples,
                result.tokens,
                result.seconds,
                before,
            )
            trainer.report(evaluation)
        self._since = time.perf_counter()


def files_of(config: EvalTasksConfig) -> dict[str, Path]:
    """The file of each task. Raises ConfigError if it does not exist, or a name alone does not say
    which of the folder it is."""
    found = {}
    for name, given in config.files.items():
        path = Path(given) if given is not None else _in_folder(name, config.eval_tasks_path or "")
        if not path.is_file():
            raise ConfigError(f"--eval-tasks {name}={path}: there is no such file")
        found[name] = path
    return found


def _in_folder(name: str, folder: str) -> Path:
    if not Path(folder).is_dir():
        raise ConfigError(f"--eval-tasks-path {folder} is not a folder")
    fitting = sorted(p for p in Path(folder).iterdir() if p.name.startswith(name) and p.is_file())
    if len(fitting) != 1:
        what = ", ".join(path.name for path in fitting) or "none"
        raise ConfigError(
            f"--eval-tasks {name}: --eval-tasks-path {folder} must have one file whose name begins "
            f"with {name!r}, and has {what}; write {name}=FILE"
        )
    return fitting[0]


def _prepared(name: str, path: Path, config: RunConfig, tokenizer: Tokenizer) -> ZeroShotTask:
    kind = name if name in TASKS else "json"
    if kind == "json" and path.suffix not in (".json", ".jsonl"):
        raise ConfigError(
            f"--eval-tasks {name}={path}: {name} is no task ({', '.join(TASKS)}), and the name of "
            "a file of documents must end in .json or .jsonl"
        )
    stride = config.tasks.eval_tasks_stride or config.model.seq_length
    raw = config.kind(RawTextConfig)
    return prepare(kind, [path], tokenizer, config.model, stride, True, raw=raw, name=name)
