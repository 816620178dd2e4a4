"""What a task is."""

from __future__ import annotations

from abc import ABC, abstractmethod

from megatron.config import Settings
from megatron.tasks.config import TaskConfig


class TaskCommand(ABC):
    """A task of ``tasks/main.py``."""

    @abstractmethod
    def run(self, config: TaskConfig, settings: Settings, processes: int) -> None:
        """Runs the task on every one of a number of processes, of which this is one.

        Args:
            config: the flags of the task.
            settings: those of training, without the task's, completed by
                :func:`megatron.tasks.command.task_settings`.

        Raises:
            ValueError, OSError: a flag, a file or a checkpoint cannot be used; the message names
                it.
        """
