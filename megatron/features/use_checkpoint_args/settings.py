"""Values that a checkpoint provides for flags that are not given."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from megatron.checkpoint.source import Source, tokenizer_in
from megatron.config import (
    CheckpointConfig,
    ConfigError,
    OptimizerFlags,
    Setting,
    Settings,
    TokenizerConfig,
)
from megatron.config.flags import build, names_of
from megatron.families import family_of
from megatron.training.resume import check_family, find_origin

_FILES = {"vocab_file", "merge_file", "tokenizer_model"}
"""Flags that name tokenizer files."""


_SCHEDULE = names_of("schedule", OptimizerFlags)


def with_checkpoint(settings: Settings) -> Settings:
    """Add the checkpoint's values for --use-checkpoint-args (model and tokenizer values that
    nothing else sets) and --use-checkpoint-opt_param-scheduler (all values of the schedules).
    Raises ConfigError if no checkpoint is named or found, or it does not have the values, and
    CheckpointError if it is damaged or of another family than the settings."""
    arguments = "use_checkpoint_args" in settings
    schedules = "use_checkpoint_opt_param_scheduler" in settings
    if not arguments and not schedules:
        return settings
    flag = "--use-checkpoint-args" if arguments else "--use-checkpoint-opt_param-scheduler"
    options = build(CheckpointConfig, settings)
    if not options.load and not options.pretrained_checkpoint:
        raise ConfigError(f"{flag} needs --load, the checkpoint to read them from")
    origin = find_origin(options)
    if origin is None:
        if arguments and "num_layers" not in settings:
            raise ConfigError(
                f"--use-checkpoint-args: no checkpoint in --load {options.load}, and no "
                "--num-layers"
            )
        return settings
    family = settings["family"].value if "family" in settings else None
    if arguments and family and origin.found.family not in family_of(family).starts_from:
        # Families in ``starts_from`` are checked by `locate`, once the values show which is
        # trained.
        check_family(origin, family)
    source = origin.found.open(verify=False)
    if arguments:
        settings = _arguments(source, own=not settings.keys() & _FILES) | settings
    if schedules:
        kept = {name: value for name, value in settings.items() if name not in _SCHEDULE}
        settings = kept | _schedules(source)
    return settings


def _arguments(source: Source, own: bool) -> Settings:
    """Return the checkpoint's model and tokenizer values. With ``own``, use the tokenizer in the
    checkpoint folder if files of its run's tokenizer no longer exist."""
    settings, tokenizer = _settings(source.model.flags(), source), source.tokenizer
    if tokenizer is not None:
        copied = tokenizer_in(source.folder) if own else None
        files = [Path(file) for name in _FILES if (file := getattr(tokenizer, name))]
        if copied is not None and not all(file.exists() for file in files):
            tokenizer = TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(copied))
        settings |= _settings(tokenizer, source)
    settings["unpadded_vocab_size"] = _setting(source.model.vocabulary.size, source)
    return settings


def _schedules(source: Source) -> Settings:
    if source.run is None or not source.run.optimizer.lr:
        raise ConfigError(
            f"--use-checkpoint-opt_param-scheduler: {source.folder} does not say what schedules "
            "its run had"
        )
    optimizer = source.run.optimizer
    values = {name: getattr(optimizer, name, None) for name in _SCHEDULE}
    return {name: _setting(value, source) for name, value in values.items() if value is not None}


def _settings(part: Any, source: Source) -> Settings:
    """Return the values of flags in ``part`` that differ from their defaults."""
    return {
        field.name: _setting(getattr(part, field.name), source)
        for field in dataclasses.fields(part)
        if getattr(part, field.name) != field.default and not field.metadata.get("internal")
    }


def _setting(value: Any, source: Source) -> Setting:
    return Setting(value, f"checkpoint {source.folder.name}")
