"""Flags of the tasks that a run evaluates during training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.config.features import FlagSection
from megatron.config.flags import POSITIVE, ConfigResolver, option


@dataclass(frozen=True)
class EvalTasksConfig(FlagSection):
    """Evaluation tasks during training: selection, files and interval."""

    after = "training"
    eval_tasks: tuple[str, ...] = option((), role="course")
    """NAME=FILE,NAME=FILE,...: tasks to evaluate on the model during training, every
    --eval-tasks-interval iterations and at the end. wikitext and lambada are the tasks of
    tasks/main.py. Any other NAME=FILE measures the perplexity of the documents in FILE.json or
    FILE.jsonl. Without =FILE, wikitext and lambada read a file in --eval-tasks-path, and other
    names are tasks of lm-eval. Nothing is downloaded."""
    eval_tasks_path: str | None = option(None, role="course")
    """Folder with the files of wikitext and lambada, and with YAML files of lm-eval tasks. The
    folder must contain exactly one file whose name begins with the task's name, such as
    lambada_test.jsonl."""
    eval_tasks_interval: int | None = option(
        None, derived="eval-interval", bounds=POSITIVE, role="course"
    )
    """Number of iterations between evaluations of --eval-tasks."""
    eval_tasks_stride: int | None = option(
        None, derived="seq-length", bounds=POSITIVE, role="course"
    )
    """Number of tokens between the starts of consecutive windows of wikitext, like
    --overlapping-eval of tasks/main.py. The default, the window length, means no overlap and the
    lowest cost."""

    @property
    def files(self) -> dict[str, str | None]:
        """Path of each task's file by task name, or None if only the name is given."""
        pairs = (word.partition("=") for word in _words(self.eval_tasks))
        return {name: file if equals else None for name, equals, file in pairs}


def _words(values: Sequence[str]) -> list[str]:
    return [word for value in values for word in value.split(",") if word]


def resolve_eval_tasks(
    flags: EvalTasksConfig, interval: int, seq_length: int, resolver: ConfigResolver
) -> EvalTasksConfig:
    """Return the flags with defaults filled in. ``interval`` is the run's --eval-interval."""
    names = [word.partition("=")[0] for word in _words(flags.eval_tasks)]
    shown = f"--eval-tasks {' '.join(flags.eval_tasks)}"
    if not names:
        for name in ("eval_tasks_path", "eval_tasks_interval", "eval_tasks_stride"):
            resolver.check(
                not resolver.given(name),
                f"{resolver.show(name)} has an effect with --eval-tasks only",
            )
        return flags
    resolver.check(all(names), f"{shown}: a task without a name; write NAME=FILE")
    resolver.check(
        len(set(names)) == len(names), f"{shown} names a task twice: give each a name of its own"
    )
    stride = resolver.fill("eval_tasks_stride", flags.eval_tasks_stride, seq_length, "seq-length")
    resolver.check(
        stride <= seq_length,
        f"{resolver.show('eval_tasks_stride')} is above --seq-length {seq_length}: tokens between "
        "two windows would be left out",
    )
    every = resolver.fill(
        "eval_tasks_interval", flags.eval_tasks_interval, interval, "eval-interval"
    )
    return replace(flags, eval_tasks_interval=every, eval_tasks_stride=stride)
