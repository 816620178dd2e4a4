"""The fine-tuned tasks of ``tasks/main.py``."""

from __future__ import annotations

from megatron.apps.tasks.config import TaskConfig
from megatron.apps.tasks.fine_tuning.encoder import Classification, MultipleChoice
from megatron.apps.tasks.fine_tuning.run import fine_tune
from megatron.apps.tasks.fine_tuning.squad.task import Squad
from megatron.apps.tasks.fine_tuning.tables import TABLES
from megatron.apps.tasks.fine_tuning.task import FineTuning
from megatron.apps.tasks.fine_tuning.text_to_text import TextRace, TextTable
from megatron.apps.tasks.registry import TaskCommand
from megatron.config import ConfigError, Setting, Settings
from megatron.families import Family, family_names, family_of


class FineTuningTask(TaskCommand):
    """Fine-tunes a model for a task, or evaluates a fine-tuned one."""

    def run(self, config: TaskConfig, settings: Settings, processes: int) -> None:
        task = with_head(config)
        head = task.settings()["head"].value
        if "family" not in settings:
            name = next(name for name in family_names() if head in family_of(name).heads)
            settings = settings | {"family": Setting(name, f"task {task.name}")}
        family = family_of(settings["family"].value)
        if head not in family.heads:
            task = as_text(config, family)
        fine_tune(task, config, settings, processes)


FINE_TUNING = FineTuningTask()


def with_head(config: TaskConfig) -> FineTuning:
    """The task for a model with a head of its own."""
    assert config.task is not None
    if config.task == Squad.name:
        return Squad(config)
    if config.task == MultipleChoice.name:
        return MultipleChoice()
    return Classification(TABLES[config.task])


def as_text(config: TaskConfig, family: Family) -> FineTuning:
    """The task for a model that predicts text. Raises ConfigError if the family does not, or the
    task's answers are places in a text."""
    assert config.task is not None
    if family.context_reader is None or config.task == Squad.name:
        head = with_head(config).settings()["head"].value
        able = [name for name in family_names() if head in family_of(name).heads]
        raise ConfigError(
            f"--task {config.task}: models of the family {family.name} have no {head} head for it; "
            f"those of {', '.join(able)} have"
        )
    if config.task == TextRace.name:
        return TextRace(family)
    return TextTable(family, TABLES[config.task])
