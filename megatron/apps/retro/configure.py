"""The configuration of a project: written by its first stage, compared by the others."""

from __future__ import annotations

import dataclasses
import errno
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megatron.apps.retro.blocks import barrier
from megatron.apps.retro.config import RetroPreprocessConfig
from megatron.apps.retro.embedding import completed_flags
from megatron.apps.retro.embedding.config import MODEL_FILES
from megatron.apps.retro.gpt_run import (
    gpt_run,
    gpt_settings,
    settings_beside_gpt,
)
from megatron.apps.retro.preprocessing import Preprocessing
from megatron.config import ConfigError, DataConfig, Settings, TokenizerConfig
from megatron.config.features import kind_classes
from megatron.config.flags import Setting, build, names_of
from megatron.features.retro.project import (
    CONFIG_FILE,
    GPT,
    TOKENIZER_FIELDS,
    RetroProject,
    sample_fields,
    write_json,
)
from megatron.features.retro.run_settings import project_of
from megatron.run.run import Run
from megatron.training.plan import TrainingPlan
from megatron.util.files import Lock, LockTakenError, remove_partial
from megatron.util.processes import is_main_process

LOCK = ".lock"
"""The file that the run has locked that writes to a project."""


def configured(settings: Settings, held: ExitStack | None = None) -> Preprocessing:
    """A project with the flags of its tool, of settings by field name. The first stage writes its
    ``config.json``; those that follow take from it what the flags leave out. Until ``held`` is
    closed, no other run may write to the project. ConfigError if one does, or the flags contradict
    the configuration."""
    if "retro_project_dir" not in settings:
        raise ConfigError("missing --retro-project-dir: the folder of the project")
    folder = Path(settings["retro_project_dir"].value)
    own = {field.name for field in dataclasses.fields(RetroPreprocessConfig)}
    others = {name: setting for name, setting in settings.items() if name not in own}
    exists = RetroProject.exists(folder)
    barrier()  # nobody writes while all look
    if exists and is_main_process():
        _begin_writing(folder, held)
    if not exists:
        config = build(RetroPreprocessConfig, settings)
        config = completed_flags(config, settings_beside_gpt(config, others))
        content = _content(config, gpt_run(gpt_settings(config, others)))
        if is_main_process():
            _make(folder)
            _begin_writing(folder, held)
            if not RetroProject.exists(folder):  # another run may have made it meanwhile
                write_json(folder / CONFIG_FILE, content)
        barrier()
        return existing(settings, compared=False)
    return existing(settings)


def _make(folder: Path) -> None:
    """Makes the folder of a project. OSError if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"--retro-project-dir {folder} cannot be made: {error.strerror}; name another folder, "
            "or allow writing there"
        ) from error


def _begin_writing(folder: Path, held: ExitStack | None) -> None:
    """Makes a project this run's own until ``held`` is closed, and deletes what killed runs left.
    ConfigError if another run is writing to it."""
    try:
        lock = Lock(folder / LOCK)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EROFS):
            return  # to validate, or to see that nothing is missing
        raise
    except LockTakenError:
        raise ConfigError(
            f"--retro-project-dir {folder}: another run is writing to it ({folder / LOCK}); wait "
            "until it ends, or start all processes as one run, with torchrun"
        ) from None
    remove_partial(folder)
    if held is None:
        lock.release()
    else:
        held.enter_context(lock)


def existing(settings: Settings, compared: bool = True) -> Preprocessing:
    """:func:`configured` for a project that has its ``config.json``, on any process. Without
    ``compared`` the data that flags name are not looked at."""
    project = project_of(settings, settings["retro_project_dir"].value)
    config = build(RetroPreprocessConfig, _completed(settings, project))
    own = {field.name for field in dataclasses.fields(RetroPreprocessConfig)}
    others = {name: setting for name, setting in settings.items() if name not in own}
    if compared:
        _compare(config, others, project)
    return Preprocessing(project, config, others)


def _completed(settings: Settings, project: RetroProject) -> Settings:
    """The settings, with the project's for those that files depend on and no flag sets.
    ConfigError if a flag sets another value."""
    found = dict(settings)
    for name in names_of("results", RetroPreprocessConfig):
        if name not in project.settings:
            continue
        value = project.settings[name]
        value = tuple(value) if isinstance(value, list) else value
        given = found.setdefault(name, Setting(value, f"{project.config_file}: {name}"))
        if given.value != value and name not in MODEL_FILES:
            raise _contradiction(given, name, value, project)
    return found


def _compare(config: RetroPreprocessConfig, others: Settings, project: RetroProject) -> None:
    """ConfigError if a flag sets another value of the GPT's data than the project has."""
    known = project.data_settings()
    defaults = {
        field.name: field.default
        for cls in (DataConfig, TokenizerConfig, *kind_classes().values())
        for field in dataclasses.fields(cls)
    }
    for name, given in gpt_settings(config, others).items():
        value = known[name].value if name in known else defaults.get(name, given.value)
        if given.value != value:
            raise _contradiction(given, GPT + name, value, project)


def _contradiction(given: Setting, name: str, value: Any, project: RetroProject) -> ConfigError:
    return ConfigError(
        f"{given.origin.removeprefix('flag ')} {_text(given.value)}: {name} of "
        f"{project.config_file} is {_text(value)}, which the project's files were made with; leave "
        "the flag out, or make another --retro-project-dir"
    )


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _content(config: RetroPreprocessConfig, run: Run) -> dict[str, Any]:
    """What ``config.json`` has at first."""
    training = run.config.training
    length, chunk = run.config.model.seq_length, config.retro_gpt_chunk_length
    if length % chunk:
        raise ConfigError(
            f"--seq-length {length} is no multiple of --retro-gpt-chunk-length {chunk}: a Retro "
            "reads the neighbours of whole chunks; change one of them"
        )
    counts = TrainingPlan(run.config).sample_counts
    return {
        **{name: getattr(config, name) for name in names_of("results", RetroPreprocessConfig)},
        "retro_gpt_seq_length": run.config.model.seq_length,
        "retro_gpt_seed": training.seed,
        "retro_gpt_global_batch_size": training.global_batch_size,
        "retro_gpt_eval_interval": training.eval_interval,
        "retro_gpt_eval_iters": training.eval_iters,
        "retro_gpt_train_samples": training.train_samples,
        "retro_gpt_valid_samples": counts[1],
        "retro_gpt_test_samples": counts[2],
        **_given(run.config.data, *run.config.kinds),
        **_given(run.config.tokenizer),
        "retro_gpt_split": run.config.data.split,
        "retro_neighbor_dirs": {},
    }


def _given(*parts: Any) -> dict[str, Any]:
    """The values of configurations that samples depend on and are not the default, under the
    project's names."""
    known = sample_fields() | TOKENIZER_FIELDS
    return {
        GPT + field.name: getattr(part, field.name)
        for part in parts
        for field in dataclasses.fields(part)
        if field.name in known and getattr(part, field.name) != field.default
    }
