"""The tasks by name, each imported when it is started."""

from __future__ import annotations

from pkgutil import resolve_name

from megatron.tasks.task import Task

TASKS: dict[str, str] = {}
"""``package.module:OBJECT`` of every :class:`Task`, by its name in ``--task``."""


def task_named(name: str) -> Task:
    """The task of a name in :data:`TASKS`."""
    return resolve_name(TASKS[name])
