"""From a command line to a `Run`: resolved configuration, DeepSpeed JSON and tokenizer."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from megatron.config import (
    FLAG_CLASSES,
    ConfigError,
    FlagParser,
    ModelConfig,
    Resolved,
    RunConfig,
    Setting,
    Settings,
    TokenizerConfig,
    explain,
    resolve,
)
from megatron.config.features import features, taking_part
from megatron.config.flags import ConfigResolver, build
from megatron.data.loader import TrainingData
from megatron.engine import deepspeed_json
from megatron.engine.deepspeed_file import read_json
from megatron.engine.deepspeed_json import Json
from megatron.engine.environment import world_size
from megatron.families import Family, family_of, refuse_unused
from megatron.tokenizer import Tokenizer, build_tokenizer, implied_type, vocabulary_rows
from megatron.training.plan import TrainingPlan
from megatron.training.report import show_log
from megatron.util.processes import is_main_process

Config = TypeVar("Config")


@dataclass(frozen=True)
class Run:
    """Completed training command. ``content`` is the DeepSpeed JSON. ``resolved`` is the
    configuration with the origin of every value. ``launched`` is True if a launcher started this
    process; the launcher would also end it."""

    config: RunConfig
    content: Json
    tokenizer: Tokenizer
    resolved: Resolved
    launched: bool


def parse_run(
    description: str | None, argv: Sequence[str] | None = None, family: str | None = None
) -> Run:
    """Resolve flags, DeepSpeed JSON and checkpoint into a run of a model family, by default
    :class:`ModelConfig`'s. If the flags require more processes, :func:`start_processes` starts
    them, and this returns in each process. With ``--explain-config``, print every value with its
    origin and exit. Raises ValueError naming any value that is missing, wrong or contradicted."""
    hidden = family_of(family).unused_flags if family else frozenset[str]()
    parser = flag_parser(description, frozenset(hidden))
    parser.prog = ArgumentParser().prog  # the name that this process was started with
    settings = parser.settings(argv)
    show_log()
    if family is not None:
        given = settings.setdefault("family", Setting(family, "this program"))
        if given.value != family:
            raise ConfigError(
                f"--model-family {given.value}: this program trains {family}; leave the flag out, "
                f"or start pretrain_{given.value}.py"
            )
    run = run_of(settings, start_processes(settings, argv))
    show_configuration(run)
    return run


def start_processes(settings: Settings, argv: Sequence[str] | None = None) -> int:
    """Return the number of processes of a run, including this one. A feature may start them with
    the same command line, or turn this process into a guardian of a rank, in which this does not
    return. Raises ConfigError if flags contradict the processes that a launcher has started."""
    counts = [feature.launch(settings, argv) for feature in taking_part()]
    launched = next((count for count in counts if count is not None), None)
    if launched is not None:
        return launched
    size = world_size()
    for feature in taking_part():
        size = feature.start(settings, size)
    return size


@functools.cache
def flag_parser(description: str | None, hidden: frozenset[str]) -> FlagParser:
    """Return the flag parser of a run. It is cached for processes that start many runs."""
    return FlagParser(*FLAG_CLASSES, description=description, hidden=hidden)


def show_configuration(run: Run) -> None:
    """With ``--explain-config``, print every value with its origin and end the process."""
    if run.config.training.explain_config:
        if is_main_process():
            print(explain(run.resolved))
        sys.exit(0)


def run_of(settings: Settings, processes: int, samples: str | None = None) -> Run:
    """Return the run of a training command on ``processes`` processes. ``samples`` is the model
    family whose data are read, by default the model's own. Raises ValueError naming any value that
    is missing, wrong or contradicted."""
    given = settings.get("deepspeed_config")
    path = given.value if given else ""
    content = read_json(path) if path else {}
    settings = deepspeed_json.merge(settings, content, path, processes)
    for feature in features().values():
        settings = feature.complete(settings, lambda rest: run_of(rest, processes, samples))
    trained = settings["family"].value if "family" in settings else ModelConfig.family
    family = family_of(samples or trained)
    refuse_unused(settings, family)
    settings = _with_tokenizer_type(family.complete_settings(settings), family)
    resolved = resolve(settings, processes)
    named = resolved.config.tokenizer
    texts = (feature.training_texts(resolved.config) for feature in features().values())
    tokenizer = build_tokenizer(named, next(filter(None, texts), None))
    # A model may have more vocabulary rows than its tokenizer has ids; checkpoints record them.
    rows = max(resolved.config.model.vocabulary.size, vocabulary_rows(named, tokenizer))
    resolved = resolved.with_vocabulary(rows)
    if rows == named.vocab_size != tokenizer.vocab_size:
        note = f"--vocab-size {rows} is more than the tokenizer's {tokenizer.vocab_size} ids"
        resolved = dataclasses.replace(resolved, notes=(*resolved.notes, note))
    completed = deepspeed_json.complete(content, resolved.config)
    notes = deepspeed_json.stage_notes(completed, resolved.config)
    notes += deepspeed_json.feature_notes(completed, resolved.config)
    notes += [line for f in features().values() for line in f.json_notes(content, path)]
    resolved = dataclasses.replace(resolved, notes=(*resolved.notes, *notes))
    launched = "LOCAL_RANK" in os.environ
    return Run(resolved.config, completed, tokenizer, resolved, launched)


def _with_tokenizer_type(settings: Settings, family: Family) -> Settings:
    """Add the tokenizer type that other flags imply, if it is not given."""
    if "tokenizer_type" in settings:
        return settings
    implied = implied_type(build(TokenizerConfig, settings), family.tokenizer_type)
    if implied is None:
        return settings
    value, reason = implied
    return settings | {"tokenizer_type": Setting(value, f"derived: {reason}")}


class RunToolParser(FlagParser, Generic[Config]):
    """Parser for a tool that works on a run. It accepts the flags of the tool's ``config`` class,
    which ``--help`` lists, and all training flags whose names the tool does not redefine."""

    def __init__(
        self, config: type[Config], description: str | None, epilog: str | None = None
    ) -> None:
        self._config = config
        super().__init__(config, *FLAG_CLASSES, description=description)
        self.epilog = epilog

    def format_help(self) -> str:
        """Return the text of --help, which lists only the tool's own flags."""
        own = FlagParser(self._config, description=self.description, prog=self.prog)
        own.usage, own.epilog = "%(prog)s [flags] [flags of pretrain_gpt.py]", self.epilog
        return own.format_help()

    def parse(self, argv: Sequence[str] | None = None) -> tuple[Config, Settings]:
        """Return the tool's options and the settings of the run. Also enable log messages. Raises
        ConfigError if an option is out of bounds."""
        show_log()
        settings = self.settings(argv)
        ConfigResolver((self._config,), settings)
        own = {field.name for field in dataclasses.fields(self._config)}  # type: ignore[arg-type]
        rest = {name: setting for name, setting in settings.items() if name not in own}
        return build(self._config, settings), rest


def run_data(run: Run) -> TrainingData:
    """Return the training, validation and test datasets, with the function that batches samples.
    Raises ValueError or OSError if data cannot be used. The message names the flag and file."""
    plan = TrainingPlan(run.config)
    data = family_of(run.config.model.family).data(run.config, run.tokenizer)
    return data.training_data(plan.sample_counts, plan.batch_sizes)
