"""Runs that evaluate a checkpoint, or generate with it: their settings, from those of training, and
their model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.generation_settings import end_tokens
from megatron.checkpoint.source import nothing_at, tokenizer_in
from megatron.config import (
    CheckpointConfig,
    ConfigError,
    DataConfig,
    OptimizerFlags,
    Setting,
    Settings,
    TokenizerConfig,
    TrainingFlags,
)
from megatron.config.features import taking_part
from megatron.config.flags import build
from megatron.engine.environment import return_freed_memory, training_device
from megatron.engine.evaluator import build_evaluator
from megatron.engine.loading import load_checkpoint
from megatron.engine.train_engine import ModelEngine
from megatron.families import spec_of
from megatron.run.process import compare_checkpoints, connected
from megatron.run.run import (
    Run,
    run_of,
    show_configuration,
)
from megatron.training.resume import find_origin
from megatron.training.resume_source import ResumeSource
from megatron.util.processes import is_main_process
from megatron.util.progress import say

MICRO_BATCH_SIZE = 8
"""Where no flag gives one; results do not depend on it."""

_OWN = "this program"
_FOR_TRAINING = (OptimizerFlags, TrainingFlags, DataConfig)
_USED = {
    *("micro_batch_size", "eval_batch_size", "eval_seq_length", "eval_iters", "seed"),
    "explain_config",
}
_FILES = {"vocab_file", "merge_file", "tokenizer_model"}
"""Of a tokenizer."""
_SAVING = {
    *("save", "save_interval", "save_init", "keep_every", "async_save", "save_universal"),
    *("checkpoint_format", "save_optim", "save_rng"),
}


@dataclass(frozen=True)
class Opened:
    """A run with the model of its checkpoint, which is in ``folder``; ``ends`` are the tokens that
    end its texts."""

    run: Run
    engine: ModelEngine
    folder: Path
    iteration: int | None
    ends: frozenset[int]


@contextmanager
def opened_checkpoint(
    settings: Settings, processes: int, what: str, watched: bool = False
) -> Iterator[Opened]:
    """The checkpoint of ``--load`` in the layout of the flags, without a training, until the block
    ends; ``what`` does not use flags about training ("an evaluation"), and does not wait for users
    if it is ``watched``. Raises ConfigError, CheckpointError or OSError if it cannot be used."""
    used, unused = evaluation_settings(checkpoint_settings(settings))
    run = evaluated_run(used, processes)
    show_configuration(run)
    notes = list(run.resolved.notes)
    if unused:
        notes.append(f"{what} does not use {', '.join(unused)}")
    origin = find_origin(run.config.checkpoint)
    if origin is None:
        named = run.config.checkpoint.load
        where = f"--load {named}: {nothing_at(named)}" if named else "--load is missing"
        raise CheckpointError(f"{where}; name one")
    with connected(run, watched=watched) as mesh:
        for feature in taking_part():
            feature.check_run(run, mesh, training_device())
        compare_checkpoints([origin.found])
        spec = spec_of(run.config.model, run.config.parallel)
        engine = build_evaluator(run.config, spec, mesh, training_device())
        source = load_checkpoint(engine, origin.found, weights_only=True)
        for note in (*notes, *source.notes) if is_main_process() else ():
            say(note)
        folder, iteration = source.folder, source.state.get("iteration")
        ends = end_tokens(run.tokenizer, source.generation)
        del source  # and with it the mapped files
        return_freed_memory()
        yield Opened(run, engine, folder, iteration, ends)


def evaluated_run(settings: Settings, processes: int) -> Run:
    """:func:`run_of` with the tokenizer that is beside the checkpoint, where the files of the run's
    own have gone and no flag names others."""
    try:
        return run_of(settings, processes)
    except FileNotFoundError:
        origin = find_origin(build(CheckpointConfig, settings))
        named = {field.name for field in dataclasses.fields(TokenizerConfig)} & settings.keys()
        folder = None if origin is None else tokenizer_in(origin.found.folder)
        if origin is None or named or folder is None:
            raise
        values = {"tokenizer_type": "HFTokenizer", "tokenizer_model": str(folder)}
        own = {name: Setting(value, origin.flag) for name, value in values.items()}
        return run_of(settings | own, processes)


def checkpoint_settings(settings: Settings) -> Settings:
    """The settings of training with the model family of the checkpoint and, where the flags do not
    describe a model, its model and tokenizer. Raises ConfigError if there is neither model nor
    checkpoint, CheckpointError if the checkpoint does not exist or is incomplete."""
    options = build(CheckpointConfig, settings)
    origin = find_origin(options)
    if origin is not None and "family" not in settings:
        family = origin.found.family
        settings = settings | {"family": Setting(family, origin.flag)}
    if {"num_layers", "encoder_num_layers", "use_checkpoint_args"} & settings.keys():
        return settings
    if origin is None:
        load = options.load
        where = f"--load {load}: {nothing_at(load)};" if load else "--load is missing:"
        raise ConfigError(f"{where} name a checkpoint, or describe a model with --num-layers")
    if not settings.keys() & _FILES:
        settings = settings | _own_tokenizer(origin)
    return settings | {"use_checkpoint_args": Setting(True, _OWN)}


def _own_tokenizer(origin: ResumeSource) -> Settings:
    """The tokenizer that a checkpoint has in its folder, where the files of its run's have gone."""
    source = origin.found.open(verify=False)
    copied, of_run = tokenizer_in(source.folder), source.tokenizer
    if of_run is None or copied is None:
        return {}
    files = [getattr(of_run, name) for name in _FILES]
    if all(Path(file).exists() for file in files if file is not None):
        return {}
    own = TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(copied))
    return {
        field.name: Setting(getattr(own, field.name), f"checkpoint {source.folder.name}")
        for field in dataclasses.fields(own)
    }


def evaluation_settings(
    settings: Settings, micro_batch_size: int | None = None
) -> tuple[Settings, list[str]]:
    """The settings of a run that evaluates, and the given flags that it does not use: those about
    training, data and what a training writes. ``micro_batch_size`` is that of
    ``--eval-micro-batch-size``."""
    classes = list[type](_FOR_TRAINING)
    for feature in taking_part():
        classes += feature.training_flags
    fields = {field.name for cls in classes for field in dataclasses.fields(cls)}
    dropped = (fields | _SAVING) - _USED
    unused = {name: setting for name, setting in settings.items() if name in dropped}
    kept = {name: setting for name, setting in settings.items() if name not in unused}
    if micro_batch_size is not None:
        kept["micro_batch_size"] = Setting(micro_batch_size, "flag --eval-micro-batch-size")
    elif "micro_batch_size" not in kept:
        kept["micro_batch_size"] = kept.get("eval_batch_size", Setting(MICRO_BATCH_SIZE, _OWN))
    kept["eval_batch_size"] = kept["micro_batch_size"]
    kept["skip_train"] = Setting(True, _OWN)
    if "deepspeed_config" not in kept:
        # The stage at which weights of half precision are all that there is.
        kept.setdefault("zero_stage", Setting(1, _OWN))
    origins = (setting.origin for setting in unused.values())
    return kept, [o.removeprefix("flag ") for o in origins if o.startswith("flag ")]
