"""The tasks of ``tasks/main.py`` by name, each imported when it is started."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pkgutil import resolve_name

from megatron.apps.tasks.config import TaskConfig
from megatron.config import Settings


class TaskCommand(ABC):
    """A task of ``tasks/main.py``."""

    @abstractmethod
    def run(self, config: TaskConfig, settings: Settings, processes: int) -> None:
        """Runs the task on every one of a number of processes, of which this is one.

        Args:
            config: the flags of the task.
            settings: those of training, without the task's, completed by
                :func:`megatron.training.evaluation.checkpoint_settings`.

        Raises:
            ValueError, OSError: a flag, a file or a checkpoint cannot be used; the message names
                it.
        """


_FINE_TUNING = "megatron.apps.tasks.fine_tuning.command:FINE_TUNING"

TASKS: dict[str, str] = {
    "WIKITEXT103": "megatron.apps.tasks.zeroshot.command:WIKITEXT103",
    "LAMBADA": "megatron.apps.tasks.zeroshot.command:LAMBADA",
    "RAW": "megatron.apps.tasks.zeroshot.command:RAW",
    **dict.fromkeys(
        ("RACE", "MNLI", "QQP", "QNLI", "SST-2", "CoLA", "STS-B", "MRPC", "RTE"), _FINE_TUNING
    ),
    "SQUAD": _FINE_TUNING,
}
"""``package.module:OBJECT`` of every :class:`TaskCommand`, by its name in ``--task``."""


def task_named(name: str) -> TaskCommand:
    """The task of a name in :data:`TASKS`."""
    return resolve_name(TASKS[name])
