"""The fine-tuned tasks of ``tasks/main.py``."""

from __future__ import annotations

from megatron.config import Setting, Settings
from megatron.families import family_names, family_of
from megatron.tasks.config import TaskConfig
from megatron.tasks.fine_tuning.encoder import Classification, EncoderTask, MultipleChoice
from megatron.tasks.fine_tuning.run import fine_tune
from megatron.tasks.fine_tuning.tables import TABLES
from megatron.tasks.task import Task


class FineTuningTask(Task):
    """Fine-tunes a model for a task, or evaluates a fine-tuned one."""

    def run(self, config: TaskConfig, settings: Settings, processes: int) -> None:
        assert config.task is not None
        task = encoder_task(config.task)
        fine_tune(task, config, with_family(settings, task), processes)


FINE_TUNING = FineTuningTask()


def encoder_task(name: str) -> EncoderTask:
    """The task of a name for an encoder with a head."""
    return MultipleChoice() if name == MultipleChoice.name else Classification(TABLES[name])


def with_family(settings: Settings, task: EncoderTask) -> Settings:
    """The settings, with the first family that has the task's head where they have none."""
    head = task.settings()["head"].value
    family = next(name for name in family_names() if head in family_of(name).heads)
    return {"family": Setting(family, f"task {task.name}")} | settings
