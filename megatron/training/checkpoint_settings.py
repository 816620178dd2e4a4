"""Settings that a run takes from the checkpoint it starts from."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.checkpoint.source import Source
from megatron.config import CheckpointConfig, ConfigError, OptimizerConfig, Setting, Settings
from megatron.training.resume import find_origin

_SCHEDULE = tuple(
    field.name
    for field in dataclasses.fields(OptimizerConfig)
    if field.name == "min_lr" or field.name.startswith("lr") or "weight_decay" in field.name
)
"""Learning rate, weight decay, and how they change."""


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
    given = {f.name: settings[f.name].value for f in _fields() if f.name in settings}
    options = CheckpointConfig(**given)
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


def _fields() -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(CheckpointConfig)


def _arguments(source: Source) -> Settings:
    found = _settings(source.model, source)
    if source.tokenizer is not None:
        found |= _settings(source.tokenizer, source)
    size = source.model.unpadded_vocab_size
    if size is not None:
        found["unpadded_vocab_size"] = _setting(size, source)
    return found


def _schedules(source: Source) -> Settings:
    if source.run is None or source.run.optimizer.lr is None:
        raise ConfigError(
            f"--use-checkpoint-opt_param-scheduler: {source.folder} does not say what schedules "
            "its run had"
        )
    found = _settings(source.run.optimizer, source)
    # It has become one of lr_warmup_{iters,samples,tokens}, which is saved beside it.
    found.pop("lr_warmup_fraction", None)
    return {name: found[name] for name in _SCHEDULE if name in found}


def _settings(part: Any, source: Source) -> Settings:
    """The values of a config part that are not the defaults."""
    return {
        field.name: _setting(getattr(part, field.name), source)
        for field in dataclasses.fields(part)
        if getattr(part, field.name) != field.default and not field.metadata.get("internal")
    }


def _setting(value: Any, source: Source) -> Setting:
    return Setting(value, f"checkpoint {source.folder.name}")
