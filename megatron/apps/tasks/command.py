r"""Evaluates a model, or fine-tunes it for a task.

    python tasks/main.py --task WIKITEXT103 --valid-data wikitext-103/wiki.test.tokens \
        --load checkpoints --micro-batch-size 8

    python tasks/main.py --task LAMBADA --strict-lambada --valid-data lambada_test.jsonl \
        --load checkpoints --micro-batch-size 8

--load takes a checkpoint of this project, Hugging Face, Megatron or DeepSpeed. Model and tokenizer
are the checkpoint's unless --num-layers is given. torchrun and deepspeed start several processes;
the results are the same for every layout.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.apps.tasks.config import TaskConfig
from megatron.apps.tasks.registry import TASKS, task_named
from megatron.config import ConfigError
from megatron.config.flags import nearest
from megatron.run.launch import start_processes
from megatron.run.process import ending_process, errors_for_users
from megatron.run.run import RunToolParser
from megatron.training.evaluation import checkpoint_settings


def main() -> None:
    """Parses the command line and runs the task."""
    with ending_process(), errors_for_users():
        run_task(__doc__)


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
    processes = start_processes(settings, argv)
    task_named(config.task).run(config, checkpoint_settings(settings), processes)
