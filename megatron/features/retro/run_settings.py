"""What the run of a Retro takes from its project: data, sizes and numbers of samples."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from megatron.config import ConfigError, Setting, Settings
from megatron.config.data import SOURCE_FIELDS
from megatron.features.retro.flags import RetroDataConfig
from megatron.features.retro.project import RetroProject

logger = logging.getLogger(__name__)

_OTHER_LENGTHS = ("train_iters", "train_tokens")


def retro_settings(settings: Settings) -> Settings:
    """The settings of a Retro's run: those of its project take the place of its flags. A program
    that trains Retros trains a GPT without ``--retro-add-retriever``, on the same samples. Raises
    ConfigError if flags contradict the project, or it has no configuration."""
    folder = settings.get("retro_project_dir")
    if folder is not None:
        settings = with_project(settings, project_of(settings, folder.value))
    settings = cyclic_settings(settings)
    retriever, family = settings.get("retro_add_retriever"), settings.get("family")
    program = family is not None and family.origin == "this program"
    if retriever is not None and retriever.value:
        mock = settings.get("mock_data")
        if program and folder is None and not (mock and mock.value):
            raise without_project()
        return settings
    if not program:
        return settings | {"retro_add_retriever": Setting(True, "family retro")}
    ours = {field.name for field in dataclasses.fields(RetroDataConfig)}
    kept = {name: value for name, value in settings.items() if name not in ours}
    return kept | {"family": Setting("gpt", "derived: without --retro-add-retriever")}


def project_of(settings: Settings, folder: str) -> RetroProject:
    """A project that may name data at URLs if the settings say where to keep what is fetched."""
    cache = settings.get("object_storage_cache_path")
    return RetroProject(folder, None if cache is None else cache.value)


def without_project() -> ConfigError:
    """What a run is told whose samples need neighbours and that names no project."""
    return ConfigError(
        "--retro-add-retriever needs --retro-project-dir, a folder of "
        "tools/retro/preprocess_data.py (or --mock-data)"
    )


def with_project(settings: Settings, project: RetroProject) -> Settings:
    """The settings of a run with those of its project in their place, of which the log says what
    contradicts them. Raises ConfigError if flags name other data."""
    taken = project.data_settings()
    for name in ("mock_data", *SOURCE_FIELDS):
        given = settings.get(name)
        if given is not None and given.value and name not in taken:
            raise ConfigError(
                f"{_shown(given)} contradicts --retro-project-dir {project.folder}, whose data "
                "have the neighbours: give one of them"
            )
    logger.info(
        "%s gives %s",
        project.config_file,
        ", ".join(f"--{name.replace('_', '-')} {_text(taken[name].value)}" for name in taken),
    )
    for name, setting in taken.items():
        given = settings.get(name)
        if given is not None and given.value != setting.value:
            logger.info(
                "%s is not used: %s is %s", _shown(given), setting.origin, _text(setting.value)
            )
    kept = dict(settings)
    if "train_samples" in taken:
        for name in _OTHER_LENGTHS:
            if name in kept:
                logger.info(
                    "%s is not used: %s is the length of the run, which --exit-interval ends "
                    "earlier",
                    _shown(kept.pop(name)),
                    taken["train_samples"].origin,
                )
    return kept | taken


def cyclic_settings(settings: Settings) -> Settings:
    """The settings of a run of ``--retro-cyclic-train-iters``, where that has an effect."""
    iters, order = settings.get("retro_cyclic_train_iters"), settings.get("dataloader_type")
    if iters is None or iters.value is None:
        return settings
    if order is None or order.value != "cyclic":
        logger.info("%s is not used: it needs --dataloader-type cyclic", _shown(iters))
        return settings
    batch = settings.get("global_batch_size")
    if "train_samples" not in settings or batch is None:
        kept = {name: value for name, value in settings.items() if name != "train_samples"}
        return kept | {"train_iters": iters}
    return settings | {"train_samples": Setting(iters.value * batch.value, iters.origin)}


def project_counts(project: RetroProject) -> tuple[int, int, int]:
    """The numbers of samples for training, validation and test that a project has neighbours for:
    those of a run with its settings. Raises ConfigError if one is missing."""
    taken = project.data_settings()
    names = ("train_samples", "global_batch_size", "eval_interval", "eval_iters")
    missing = [f"retro_gpt_{name}" for name in names if name not in taken]
    if missing:
        raise ConfigError(
            f"{project.config_file} has no {', '.join(missing)}: make the project again with "
            "tools/retro/preprocess_data.py"
        )
    samples, batch, interval, iters = (taken[name].value for name in names)
    steps, evaluation = samples // batch, iters * batch
    return steps * batch, (steps // interval + 1) * evaluation, evaluation


def _shown(setting: Setting) -> str:
    return f"{setting.origin.removeprefix('flag ')} {_text(setting.value)}"


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
