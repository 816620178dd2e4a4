"""The tasks by name, each imported when it is started."""

from __future__ import annotations

from pkgutil import resolve_name

from megatron.tasks.task import TaskCommand

_FINE_TUNING = "megatron.tasks.fine_tuning.command:FINE_TUNING"

TASKS: dict[str, str] = {
    "WIKITEXT103": "megatron.tasks.zeroshot.command:WIKITEXT103",
    "LAMBADA": "megatron.tasks.zeroshot.command:LAMBADA",
    "RAW": "megatron.tasks.zeroshot.command:RAW",
    **dict.fromkeys(
        ("RACE", "MNLI", "QQP", "QNLI", "SST-2", "CoLA", "STS-B", "MRPC", "RTE"), _FINE_TUNING
    ),
    "SQUAD": _FINE_TUNING,
}
"""``package.module:OBJECT`` of every :class:`TaskCommand`, by its name in ``--task``."""


def task_named(name: str) -> TaskCommand:
    """The task of a name in :data:`TASKS`."""
    return resolve_name(TASKS[name])
