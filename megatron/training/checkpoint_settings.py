"""Settings that a run takes from the checkpoint it starts from."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.checkpoint.source import Source
from megatron.config import CheckpointConfig, ConfigError, OptimizerFlags, Setting, Settings
from megatron.config.flags import build, names_of
from megatron.training.resume import find_origin

_SCHEDULE = names_of("schedule", OptimizerFlags)


def with_checkpoint(settings: Settings) -> Settings:
    """Adds what --use-checkpoint-args and --use-checkpoint-opt_param-scheduler ask for.

    The first takes those values of model and tokenizer that nothing else gives; the second all of
    the schedules, whatever the flags say.

    Raises:
        ConfigError: there is no checkpoint to take them from, or it does not say.
        CheckpointError: the checkpoint is damaged.
    """
    arguments = "use_checkpoint_args" in settings
    schedules = "use_checkpoint_opt_param_scheduler" in settings
    if not arguments and not schedules:
        return settings
    flag = "--use-checkpoint-args" if arguments else "--use-checkpoint-opt_param-scheduler"
    options = build(CheckpointConfig, settings)
    if not options.load and not options.pretrained_checkpoint:
        raise ConfigError(f"{flag} needs --load, the checkpoint to take them from")
    origin = find_origin(options)
    if origin is None:
        if arguments and "num_layers" not in settings:
            raise ConfigError(
                f"--use-checkpoint-args: there is no checkpoint in --load {options.load}, and no "
                "--num-layers"
            )
        return settings
    source = origin.found.open(verify=False)
    if arguments:
        settings = _arguments(source) | settings
    if schedules:
        kept = {name: value for name, value in settings.items() if name not in _SCHEDULE}
        settings = kept | _schedules(source)
    return settings


def _arguments(source: Source) -> Settings:
    found = _settings(source.model.flags(), source)
    if source.tokenizer is not None:
        found |= _settings(source.tokenizer, source)
    found["unpadded_vocab_size"] = _setting(source.model.vocabulary.size, source)
    return found


def _schedules(source: Source) -> Settings:
    if source.run is None or not source.run.optimizer.lr:
        raise ConfigError(
            f"--use-checkpoint-opt_param-scheduler: {source.folder} does not say what schedules "
            "its run had"
        )
    optimizer = source.run.optimizer
    found = {name: getattr(optimizer, name, None) for name in _SCHEDULE}
    return {name: _setting(value, source) for name, value in found.items() if value is not None}


def _settings(part: Any, source: Source) -> Settings:
    """The values of a part's flags that are not the defaults."""
    return {
        field.name: _setting(getattr(part, field.name), source)
        for field in dataclasses.fields(part)
        if getattr(part, field.name) != field.default and not field.metadata.get("internal")
    }


def _setting(value: Any, source: Source) -> Setting:
    return Setting(value, f"checkpoint {source.folder.name}")
