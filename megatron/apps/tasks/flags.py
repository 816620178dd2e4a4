"""Flags of the tasks that a run evaluates while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.config.features import FlagSection
from megatron.config.flags import POSITIVE, ConfigResolver, option


@dataclass(frozen=True)
class EvalTasksConfig(FlagSection):
    """Evaluation tasks while training: which, where their files are, how often."""

    after = "training"
    eval_tasks: tuple[str, ...] = option((), role="course")
    """NAME=FILE,NAME=FILE,...: evaluate these tasks on the model in training, every
    --eval-tasks-interval iterations and at the end. wikitext and lambada are the tasks of
    tasks/main.py, any other NAME the perplexity of the documents in FILE.json or FILE.jsonl.
    wikitext and lambada without =FILE have their files in --eval-tasks-path, other names alone are
    tasks of lm-eval. Nothing is downloaded."""
    eval_tasks_path: str | None = option(None, role="course")
    """Folder with the files of wikitext and lambada, each the only one whose name begins so, such
    as lambada_test.jsonl; and with the YAML files of lm-eval's tasks."""
    eval_tasks_interval: int | None = option(
        None, derived="eval-interval", bounds=POSITIVE, role="course"
    )
    """Number of iterations between evaluations of --eval-tasks."""
    eval_tasks_stride: int | None = option(
        None, derived="seq-length", bounds=POSITIVE, role="course"
    )
    """Tokens between the beginnings of two windows of wikitext: --overlapping-eval of
    tasks/main.py. Windows as far apart as they are long overlap nowhere and cost least."""

    @property
    def files(self) -> dict[str, str | None]:
        """The file of each task, None where only its name is given."""
        pairs = (word.partition("=") for word in _words(self.eval_tasks))
        return {name: file if equals else None for name, equals, file in pairs}


def _words(values: Sequence[str]) -> list[str]:
    return [word for value in values for word in value.split(",") if word]


def resolve_eval_tasks(
    flags: EvalTasksConfig, interval: int, seq_length: int, resolver: ConfigResolver
) -> EvalTasksConfig:
    """Completes the tasks of a run that evaluates every ``interval`` iterations."""
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
