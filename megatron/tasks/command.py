"""One task, from a command line."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config import CheckpointConfig, ConfigError, Setting, Settings
from megatron.config.flags import ConfigResolver, build, nearest
from megatron.tasks.config import TaskConfig
from megatron.tasks.registry import TASKS, task_named
from megatron.training.launch import start_processes
from megatron.training.resume import find_origin
from megatron.training.run import RunToolParser

_OWN = "this program"


def run_task(description: str | None, argv: Sequence[str] | None = None) -> None:
    """Runs the task of a command line. Raises ValueError or OSError if a flag, a file or a
    checkpoint cannot be used; the message names it."""
    epilog = f"The tasks are {', '.join(TASKS)}."
    config, settings = RunToolParser(TaskConfig, description, epilog).parse(argv)
    if config.task is None:
        raise ConfigError(f"--task is missing: {', '.join(TASKS)}")
    if config.task not in TASKS:
        hint = nearest(config.task, TASKS, "; the nearest is {}")
        raise ConfigError(f"--task {config.task}: the tasks are {', '.join(TASKS)}{hint}")
    _check_numbers(config)
    processes = start_processes(settings, argv)
    task_named(config.task).run(config, task_settings(settings), processes)


def _check_numbers(config: TaskConfig) -> None:
    """Refuses numbers out of their bounds."""
    given = {
        name: Setting(value, f"flag --{name.replace('_', '-')}")
        for name, value in vars(config).items()
    }
    ConfigResolver((TaskConfig,), given)


def task_settings(settings: Settings) -> Settings:
    """The settings of training with the model family of the checkpoint and, where the flags do not
    describe a model, its model and tokenizer. Raises ConfigError if there is neither model nor
    checkpoint, CheckpointError if the checkpoint does not exist or is incomplete."""
    options = build(CheckpointConfig, settings)
    origin = find_origin(options)
    if origin is not None and "family" not in settings:
        family = origin.found.form.family(origin.found.folder)
        settings = settings | {"family": Setting(family, origin.flag)}
    if {"num_layers", "encoder_num_layers", "use_checkpoint_args"} & settings.keys():
        return settings
    if origin is None:
        where = f"--load {options.load} has no checkpoint" if options.load else "--load is missing"
        raise ConfigError(f"{where}: name a checkpoint, or describe a model with --num-layers")
    return settings | {"use_checkpoint_args": Setting(True, _OWN)}
