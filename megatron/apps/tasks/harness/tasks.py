"""Load tasks of lm-eval and of the user's files by name, and evaluate them during training."""

from __future__ import annotations

import fnmatch
import logging
import os
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.group import Group
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from megatron.apps.tasks.harness.documents import file_in, reading
from megatron.apps.tasks.harness.model import HarnessModel
from megatron.apps.tasks.harness.scoring import TextScorer
from megatron.apps.tasks.harness.version_02 import name_today
from megatron.apps.tasks.report import TaskResult
from megatron.config import ConfigError
from megatron.config.flags import nearest
from megatron.engine.train_engine import ModelEngine
from megatron.tokenizer import Tokenizer

LOCAL_FILES = (
    "TASK=FILE reads documents of this machine, and so does a task of your own in --include-path "
    "(docs/guides/evaluation.md)"
)


class HarnessTask:
    """Task or group of lm-eval with its documents, which are loaded once. Raises ConfigError if the
    task is unknown, or if its data are not on this machine."""

    def __init__(self, name: str, include_path: str | None, tokenizer: Tokenizer) -> None:
        self.name, self._tokenizer = name, tokenizer
        self._manager, self._tasks = load_tasks([name], include_path, None, "--eval-tasks")

    def evaluate(self, engine: ModelEngine, micro_batch_size: int) -> TaskResult:
        """Evaluate the task. Return lm-eval's metrics on the main process, no metrics on other
        ranks. Collective: every rank must call it. In a group, each metric's name is prefixed with
        the name of its task. Random seeds are not changed. Raises ConfigError if the task generates
        text."""
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
        if results is None:  # lm-eval returns results on the main process only
            return TaskResult(self.name, {}, 0, tokens, seconds)
        examples = sum(count["effective"] for count in results["n-samples"].values())
        return TaskResult(self.name, self._metrics(results["results"]), examples, tokens, seconds)

    def _metrics(self, results: dict[str, dict[str, Any]]) -> dict[str, float]:
        metrics = {}
        for task, values in results.items():
            for key, value in values.items():
                metric, comma, filtered = key.partition(",")
                if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                    continue
                words = [*([] if task == self.name else [task]), metric]
                words += [] if filtered == "none" else [filtered]
                metrics["_".join(words)] = float(value)
        return metrics


def load_tasks(
    names: Sequence[str],
    include_path: str | None,
    metadata: dict[str, Any] | None,
    flag: str = "--tasks",
) -> tuple[TaskManager, list[Task | Group]]:
    """Return tasks and groups with their documents, and the lm-eval manager that loaded them.
    ``names`` are the values of ``flag``: tasks, groups, tags, patterns, YAML files, or TASK=FILE;
    with ``--task_list`` they may be lm-eval 0.2 names. Raises ConfigError if a name is unknown, or
    if data are not on this machine."""
    pairs = [(name, "") if _is_file(name) else name.partition("=")[::2] for name in names]
    manager = _manager([name for name, _ in pairs], include_path, metadata)
    users = _of_folder(manager)
    loaded: dict[tuple[str, Path | None], list[Task | Group]] = {}
    for name, path in pairs:
        known = name_today(name) if flag == "--task_list" and name not in users else name
        file = Path(path) if path else None
        if file is None and known in set(manager.all_subtasks) - users:
            file = file_in(include_path, name, flag)
        for spec in _matching(known, manager, flag):
            if (spec, file) in loaded:
                continue
            tasks = loaded[spec, file] = _loaded(spec, file, manager, flag)
            if known != name and len(tasks) == 1 and isinstance(tasks[0], Task):
                tasks[0].config.task = name  # results use the user's name for the task
    return manager, [task for tasks in loaded.values() for task in tasks]


def _of_folder(manager: TaskManager) -> set[str]:
    """Return the names of the tasks that are defined in the user's files."""
    folder = manager.include_path
    if folder is None:
        return set()
    root = Path(str(folder)).resolve()
    paths = {name: entry.yaml_path for name, entry in manager.task_index.items()}
    return {name for name, path in paths.items() if path and root in Path(path).resolve().parents}


def _reading(name: str, path: Path, manager: TaskManager, flag: str) -> list[Task | Group]:
    """Return a task of lm-eval, changed to read its documents from a file."""
    if name not in manager.all_subtasks:
        entry = manager.task_index[name]
        members = sorted(entry.tags) or [*map(str, (entry.cfg or {}).get("task") or ())]
        more = f" and {len(members) - 6} more" if len(members) > 6 else ""
        raise ConfigError(
            f"{flag} {name}={path}: {name} is several tasks; name one of them, with the file of "
            f"its documents: {', '.join(members[:6])}{more}"
        )
    changes = reading(name, path, flag)
    quiet = logging.getLogger("lm_eval.api.task")
    before = quiet.level
    try:
        quiet.setLevel(logging.ERROR)  # suppress the advice to use --metadata, which does not apply
        built = manager.load([{"group": "files", "task": [{"task": name, **changes}]}])
    except Exception as error:
        raise ConfigError(
            f"{flag} {name}={path}: the documents must have the fields of the task's own: "
            f"{_first_line(error)}"
        ) from error
    finally:
        quiet.setLevel(before)
    tasks = list(built["tasks"].values())
    tasks[0].config.custom_dataset = None  # already read; results name the file
    return [*tasks]


def generate(tasks: Sequence[Task | Group]) -> bool:
    """Return whether any of the tasks, or of a group's tasks, requires generated text."""
    single = chain.from_iterable(
        task.get_all_tasks() if isinstance(task, Group) else [task] for task in tasks
    )
    return any(task.get_config("output_type") == "generate_until" for task in single)


def _manager(
    names: Sequence[str], include_path: str | None, metadata: dict[str, Any] | None
) -> TaskManager:
    """Return a task manager. It includes lm-eval's own tasks only if ``names`` need them, because
    reading their files takes ten seconds."""
    own = TaskManager(include_path=include_path, include_defaults=False, metadata=metadata)
    index = own.task_index
    members = [
        member if isinstance(member, str) else member.get("task") or member.get("group")
        for entry in index.values()
        for member in ((entry.cfg or {}).get("task") or [])
        if isinstance((entry.cfg or {}).get("task"), list)
    ]
    if all(name in index or _is_file(name) for name in (*names, *members)):
        return own
    return TaskManager(include_path=include_path, metadata=metadata)


def _is_file(name: Any) -> bool:
    return isinstance(name, str) and name.endswith((".yaml", ".yml")) and Path(name).is_file()


def _matching(name: str, manager: TaskManager, flag: str) -> list[str]:
    """Return the task names that match a name or pattern on the command line. Raises ConfigError if
    none does."""
    if name in manager.task_index or _is_file(name):
        return [name]
    names = fnmatch.filter(manager.all_tasks, name) if set("*?[") & set(name) else []
    if not names:
        hint = nearest(name, manager.all_tasks, "; the nearest is {}")
        hint = hint or "; `lm-eval ls tasks` lists lm-eval's, --include-path adds your own"
        raise ConfigError(f"{flag} {name}: no task, group or tag of this name{hint}")
    return names


def _loaded(spec: str, file: Path | None, manager: TaskManager, flag: str) -> list[Task | Group]:
    if file is not None:
        return _reading(spec, file, manager, flag)
    # The datasets package reports a missing dataset with several kinds of errors.
    logging.getLogger("datasets").setLevel(logging.ERROR)
    try:
        built = manager.load([spec])
    except Exception as error:
        entry = manager.task_index.get(spec)
        data = (entry.cfg or {}).get("dataset_path") if entry else None
        first = _first_line(error)
        if isinstance(error, ConnectionError) or "offline" in str(error).lower():
            data = data or "its data"
            if os.environ.get("HF_DATASETS_OFFLINE") == "0":
                raise ConfigError(
                    f"{flag} {spec}: {data} cannot be downloaded: {first}; {LOCAL_FILES}"
                ) from error
            raise ConfigError(
                f"{flag} {spec}: {data} would be downloaded, which is turned off: {LOCAL_FILES}; "
                "or set HF_DATASETS_OFFLINE=0 HF_HUB_OFFLINE=0"
            ) from error
        if isinstance(error, FileNotFoundError):
            raise ConfigError(f"{flag} {spec}: {first}; {LOCAL_FILES}") from error
        raise ConfigError(f"{flag} {spec}: lm-eval cannot load it: {first}") from error
    inside = {task for group in built.get("groups", {}).values() for task in group.child_names}
    groups = [group for name, group in built.get("groups", {}).items() if name not in inside]
    return [*groups] if groups else [*built["tasks"].values()]


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
