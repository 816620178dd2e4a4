"""The settings of the runs of tasks, from those of training."""

from __future__ import annotations

import dataclasses

from megatron.config import (
    CheckpointConfig,
    ConfigError,
    DataConfig,
    OptimizerFlags,
    Setting,
    Settings,
    TrainingFlags,
)
from megatron.config.flags import build
from megatron.config.output import ProfilingConfig
from megatron.tasks.config import TaskConfig
from megatron.training.resume import find_origin

MICRO_BATCH_SIZE = 8
"""Where no flag gives one; results do not depend on it."""

_OWN = "this program"
_FOR_TRAINING = (OptimizerFlags, TrainingFlags, DataConfig, ProfilingConfig)
_USED = {
    *("micro_batch_size", "eval_batch_size", "eval_seq_length", "eval_iters", "seed"),
    "explain_config",
}
_SAVING = {
    *("save", "save_interval", "save_init", "keep_every", "async_save", "save_universal"),
    *("checkpoint_format", "save_optim", "save_rng"),
}


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


def evaluation_settings(config: TaskConfig, settings: Settings) -> tuple[Settings, list[str]]:
    """The settings of a run that evaluates, and the given flags that it does not use: those about
    training, data and what a training writes."""
    fields = {field.name for cls in _FOR_TRAINING for field in dataclasses.fields(cls)}
    dropped = (fields | _SAVING) - _USED
    unused = {name: setting for name, setting in settings.items() if name in dropped}
    kept = {name: setting for name, setting in settings.items() if name not in unused}
    size = config.eval_micro_batch_size
    if size is not None:
        kept["micro_batch_size"] = Setting(size, "flag --eval-micro-batch-size")
    elif "micro_batch_size" not in kept:
        kept["micro_batch_size"] = kept.get("eval_batch_size", Setting(MICRO_BATCH_SIZE, _OWN))
    kept["eval_batch_size"] = kept["micro_batch_size"]
    kept["skip_train"] = Setting(True, _OWN)
    if "deepspeed_config" not in kept:
        # The stage at which weights of half precision are all that there is.
        kept.setdefault("zero_stage", Setting(1, _OWN))
    origins = (setting.origin for setting in unused.values())
    return kept, [o.removeprefix("flag ") for o in origins if o.startswith("flag ")]
