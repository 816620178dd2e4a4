"""From a command line to a run: one resolved configuration, checked, printed, and explained."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config import (
    FLAG_CLASSES,
    ConfigError,
    FlagParser,
    Resolved,
    RunConfig,
    Setting,
    Settings,
    explain,
    resolve,
)
from megatron.data.loader import TrainingData
from megatron.data.pipeline import training_texts
from megatron.data.sources import with_corpora
from megatron.engine import deepspeed_json
from megatron.engine.deepspeed_json import Json, read_json
from megatron.engine.environment import world_size
from megatron.families import family_of
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.training.checkpoint_settings import with_checkpoint
from megatron.training.log import show_log
from megatron.training.plan import TrainingPlan
from megatron.util.processes import is_main_process


@dataclass(frozen=True)
class Run:
    """What a training command was asked to do.

    Attributes:
        config: the complete configuration.
        content: the completed DeepSpeed JSON.
        tokenizer: the tokenizer, whose vocabulary sizes the token table.
        resolved: the configuration with the origin of every value.
        launched: whether a launcher started this process and would end it.
    """

    config: RunConfig
    content: Json
    tokenizer: Tokenizer
    resolved: Resolved
    launched: bool


def parse_run(
    description: str | None, argv: Sequence[str] | None = None, family: str | None = None
) -> Run:
    """Resolves flags, DeepSpeed JSON and checkpoint into a run.

    With ``--explain-config`` it prints every value with its origin and exits.

    Args:
        description: what ``--help`` says of the command.
        argv: the flags; those of the process by default.
        family: of the model; the default of :class:`ModelConfig` without it.

    Raises:
        ValueError: a value is missing, wrong or contradicted; the message names it.
    """
    settings = FlagParser(*FLAG_CLASSES, description=description).settings(argv)
    show_log()
    if family is not None:
        given = settings.setdefault("family", Setting(family, "this program"))
        if given.value != family:
            raise ConfigError(
                f"--model-family {given.value}: this program trains {family}; leave the flag out, "
                f"or start pretrain_{given.value}.py"
            )
    run = run_of(settings, world_size())
    if run.config.training.explain_config:
        if is_main_process():
            print(explain(run.resolved))
        sys.exit(0)
    return run


def run_of(settings: Settings, processes: int) -> Run:
    """Completes the settings of a training command for a number of processes.

    Raises:
        ValueError: a value is missing, wrong or contradicted; the message names it.
    """
    given = settings.get("deepspeed_config")
    path = given.value if given else ""
    content = read_json(path) if path else {}
    settings = deepspeed_json.merge(settings, content, path, processes)
    settings = with_checkpoint(with_corpora(settings))
    resolved = resolve(settings, processes)
    tokenizer = build_tokenizer(resolved.config.tokenizer, training_texts(resolved.config))
    # A model may have more rows than its tokenizer has tokens: a checkpoint says how many.
    rows = resolved.config.model.vocabulary.size
    resolved = resolved.with_vocabulary(max(rows, tokenizer.vocab_size))
    completed = deepspeed_json.complete(content, resolved.config)
    launched = "LOCAL_RANK" in os.environ
    return Run(resolved.config, completed, tokenizer, resolved, launched)


def run_data(run: Run) -> TrainingData:
    """Datasets of all parts, and what makes batches of their samples.

    Raises:
        ValueError, OSError: data that cannot be used; the message names flag and file.
    """
    plan = TrainingPlan(run.config)
    data = family_of(run.config.model.family).data(run.config, run.tokenizer)
    return data.training_data(plan.sample_counts, plan.batch_sizes)


@contextlib.contextmanager
def errors_for_users() -> Iterator[None]:
    """Turns errors that are about the user's input into one line and exit status 2.

    An error that this package raised with a message for users is such an error; anything raised
    deeper (torch, deepspeed, an assertion) keeps its traceback.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = Path(__file__).resolve().parent.parent
        about_input = isinstance(error, OSError) or Path(frames[-1].filename).is_relative_to(own)
        if not about_input:
            raise
        if not is_main_process():
            # All processes usually find the same; the launcher ends this one once the main
            # process has said it.
            time.sleep(5)
            print(f"rank {os.environ['RANK']}: ", end="", file=sys.stderr)
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


@contextlib.contextmanager
def ending_process() -> Iterator[None]:
    """Ends the process after a command, without having Python take itself apart.

    gloo's threads let go of tensors some time after a collective. When that falls into the
    interpreter's own end, they are refused its lock and take the finished process down with SIGABRT
    (torch 2.13).
    """
    status: Any = 0
    try:
        yield
    except SystemExit as exit:
        status = exit.code
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)
