"""The tasks of a command line, from lm-eval and from files of the user's own."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.group import Group
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from megatron.config import ConfigError
from megatron.config.flags import nearest

LOCAL_FILES = (
    "a task of your own with `dataset_path: json` and `dataset_kwargs: {data_files: ...}` in "
    "--include-path reads local files (docs/guides/evaluation.md)"
)
_PATTERN = frozenset("*?[")


def load_tasks(
    names: Sequence[str],
    include_path: str | None,
    metadata: dict[str, Any] | None,
    flag: str = "--tasks",
) -> tuple[TaskManager, list[Task | Group]]:
    """Tasks and groups with their documents, and what found them. ``names``, those of ``flag``, are
    those of tasks, groups or tags, patterns, or YAML files. Raises ConfigError if one is unknown,
    or its data are not on this machine."""
    manager = _manager(names, include_path, metadata)
    specs = [found for name in names for found in _matching(name, manager, flag)]
    loaded: list[Task | Group] = []
    for spec in dict.fromkeys(specs):
        loaded += _loaded(spec, manager, flag)
    return manager, loaded


def _manager(
    names: Sequence[str], include_path: str | None, metadata: dict[str, Any] | None
) -> TaskManager:
    """With lm-eval's own tasks only where they are needed: reading their files takes ten
    seconds."""
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
    """The known names that a name of the command line means."""
    if name in manager.task_index or _is_file(name):
        return [name]
    found = fnmatch.filter(manager.all_tasks, name) if _PATTERN & set(name) else []
    if not found:
        hint = nearest(name, manager.all_tasks, "; the nearest is {}")
        hint = hint or "; `lm-eval ls tasks` lists lm-eval's, --include-path adds your own"
        raise ConfigError(f"{flag} {name}: no task, group or tag of this name{hint}")
    return found


def _loaded(spec: str, manager: TaskManager, flag: str) -> list[Task | Group]:
    # datasets reports a missing data set by several kinds of errors, some of them its own.
    logging.getLogger("datasets").setLevel(logging.ERROR)
    try:
        built = manager.load([spec])
    except Exception as error:
        entry = manager.task_index.get(spec)
        data = (entry.cfg or {}).get("dataset_path") if entry else None
        first = str(error).strip().split("\n")[0] or type(error).__name__
        if isinstance(error, ConnectionError) or "offline" in str(error).lower():
            data = data or "its data"
            raise ConfigError(
                f"{flag} {spec}: {data} would be downloaded, which is turned off: {LOCAL_FILES}; "
                "or set HF_DATASETS_OFFLINE=0 HF_HUB_OFFLINE=0"
            ) from error
        if isinstance(error, FileNotFoundError):
            raise ConfigError(f"{flag} {spec}: {first}; {LOCAL_FILES}") from error
        raise ConfigError(f"{flag} {spec}: lm-eval cannot load it: {first}") from error
    inside = {task for group in built.get("groups", {}).values() for task in group.child_names}
    groups = [group for name, group in built.get("groups", {}).items() if name not in inside]
    tasks = [task for name, task in built["tasks"].items()]
    return [*groups] if groups else [*tasks]
