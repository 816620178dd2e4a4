"""State shared by the stages of ``tools/retro/preprocess_data.py``: the project, and the run of a
GPT whose samples get neighbours. The first stage writes the project's configuration; later stages
check their flags against it."""

from __future__ import annotations

import dataclasses
import errno
import os
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.apps.retro.blocks import barrier
from megatron.apps.retro.config import MODEL_FILES, RetroPreprocessConfig
from megatron.apps.retro.embedding import Embedder, build_embedder, completed_flags
from megatron.config import ConfigError, DataConfig, Setting, Settings, TokenizerConfig
from megatron.config.data import SOURCE_FIELDS
from megatron.config.features import kind_classes
from megatron.config.flags import build, names_of
from megatron.data.indexed import idx_path
from megatron.data.sources import PARTS
from megatron.features.retro.chunks import ChunkDatabase
from megatron.features.retro.project import (
    CONFIG_FILE,
    FILES,
    GPT,
    PATHS,
    TOKENIZER_FIELDS,
    RetroProject,
    project_of,
    sample_fields,
    write_json,
)
from megatron.run.run import Run, run_of
from megatron.tokenizer import Tokenizer
from megatron.training.plan import TrainingPlan
from megatron.util.files import Lock, LockTakenError, remove_partial
from megatron.util.processes import is_main_process

_LOCK = ".lock"
"""Lock file, locked by the run that writes to a project."""
_EMBEDDER = "retro_embedder"
"""Key in ``config.json`` for everything that the embeddings depend on."""
_ORIGIN = "tools/retro/preprocess_data.py"
_SMALLEST = {
    "num_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 1,
    "micro_batch_size": 1,
    "lr": 1.0,
    "torch_compile": "off",
}
"""Smallest possible model. It is never built, because only the data of its run are used."""
_NEEDED = {
    "seq_length": "tokens of a sample",
    "global_batch_size": "samples of a step of training",
    "train_samples": "training samples, which get neighbours",
}
_LISTS = frozenset(
    name for name in (*SOURCE_FIELDS, "corpora_file") if name.endswith(("_args_path", "_file"))
) | {f"{part}_weighted_split_paths_path" for part in PARTS}
"""Settings that contain the path of a file that lists data."""
_CACHES = ("data_cache_path", "object_storage_cache_path")
"""Flags that do not affect the samples."""


@dataclass(frozen=True)
class Preprocessing:
    """A project, the preprocessing tool's flags completed from the project's ``config.json``, and
    the training flags."""

    project: RetroProject
    config: RetroPreprocessConfig
    settings: Settings

    @cached_property
    def run(self) -> Run:
        """Run of the GPT whose samples get neighbours."""
        return project_run(self.project, self.settings)

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the GPT."""
        return self.run.tokenizer

    @cached_property
    def database(self) -> ChunkDatabase:
        """Chunks of the training documents. Raises the errors of ``RetroProject.database``."""
        return self.project.database(self.tokenizer.eod)

    @cached_property
    def embedder(self) -> Embedder:
        """Embedder that the flags describe. Raises ConfigError if the project has another one."""
        embedder = build_embedder(self.config, _settings_of_bert(self.config, self.settings))
        identity = dict(embedder.identity)
        before = self.project.settings.get(_EMBEDDER)
        if before is None:
            self.project.record({_EMBEDDER: identity})
        elif before != identity:
            keys = [key for key in identity | before if identity.get(key) != before.get(key)]
            told = ", ".join(f"{key} {identity.get(key)} is not {before.get(key)}" for key in keys)
            raise ConfigError(
                f"the embedder is not the one of {self.project.config_file}: {told}; name that one "
                "(--bert-embedder-type, --bert-load), or make another --retro-project-dir"
            )
        return embedder


def configured(settings: Settings, locks: ExitStack | None = None) -> Preprocessing:
    """Return a project with the tool's flags, given settings by field name. The first stage writes
    ``config.json``; later stages complete the flags from it. Until ``locks`` is closed, no other
    run may write to the project. Collective: every process must call it. Raises ConfigError if
    another run is writing, or if the flags contradict the configuration."""
    if "retro_project_dir" not in settings:
        raise ConfigError("missing --retro-project-dir: the folder of the project")
    folder = Path(settings["retro_project_dir"].value)
    exists = RetroProject.exists(folder)
    barrier()  # no process may write while another still checks for the file
    if exists:
        if is_main_process():
            _begin_writing(folder, locks)
        return existing(settings)
    config, others = build(RetroPreprocessConfig, settings), _others(settings)
    config = completed_flags(config, _settings_of_bert(config, others))
    content = _content(config, gpt_run(gpt_settings(config, others)))
    if is_main_process():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"--retro-project-dir {folder} cannot be made: {error.strerror}; name another "
                "folder, or allow writing there"
            ) from error
        _begin_writing(folder, locks)
        # another run may have created the project in the meantime
        if not RetroProject.exists(folder):
            write_json(folder / CONFIG_FILE, content)
    barrier()
    return existing(settings, compared=False)


def existing(settings: Settings, compared: bool = True) -> Preprocessing:
    """Return the same as :func:`configured` for an existing project, without locking it. With
    ``compared`` False, the flags of the GPT's data are not checked against the configuration."""
    project = project_of(settings, settings["retro_project_dir"].value)
    config = build(RetroPreprocessConfig, _completed(settings, project))
    others = _others(settings)
    if compared:
        _compare(config, others, project)
    return Preprocessing(project, config, others)


def _others(settings: Settings) -> Settings:
    """Return the settings that are training flags."""
    names = {field.name for field in dataclasses.fields(RetroPreprocessConfig)}
    return {name: setting for name, setting in settings.items() if name not in names}


def _begin_writing(folder: Path, locks: ExitStack | None) -> None:
    """Lock a project until ``locks`` is closed, and delete an interrupted run's partial files.
    Raises ConfigError if another run is writing to the project."""
    try:
        lock = Lock(folder / _LOCK)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EROFS):
            return  # read-only use, such as validation of a finished project
        raise
    except LockTakenError:
        raise ConfigError(
            f"--retro-project-dir {folder}: another run is writing to it ({folder / _LOCK}); wait "
            "until it ends, or start all processes as one run, with torchrun"
        ) from None
    remove_partial(folder)
    if locks is None:
        lock.release()
    else:
        locks.enter_context(lock)


def _completed(settings: Settings, project: RetroProject) -> Settings:
    """Return the settings, completed with the project's values of settings that its files depend
    on. Raises ConfigError if a flag has another value than the project."""
    completed = dict(settings)
    for name in names_of("results", RetroPreprocessConfig):
        if name not in project.settings:
            continue
        value = project.settings[name]
        value = tuple(value) if isinstance(value, list) else value
        given = completed.setdefault(name, Setting(value, f"{project.config_file}: {name}"))
        if given.value != value and name not in MODEL_FILES:
            raise _contradiction(given, name, value, project)
    return completed


def _compare(config: RetroPreprocessConfig, others: Settings, project: RetroProject) -> None:
    """Raise ConfigError if a flag of the GPT's data has another value than in the project."""
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
    """Return the initial content of ``config.json``."""
    training, data = run.config.training, run.config.data
    length, chunk = run.config.model.seq_length, config.retro_gpt_chunk_length
    if length % chunk:
        raise ConfigError(
            f"--seq-length {length} is no multiple of --retro-gpt-chunk-length {chunk}: a Retro "
            "reads the neighbours of whole chunks; change one of them"
        )
    counts = TrainingPlan(run.config).sample_counts
    known = sample_fields() | TOKENIZER_FIELDS
    parts: tuple[Any, ...] = (data, *run.config.kinds, run.config.tokenizer)
    return {
        **{name: getattr(config, name) for name in names_of("results", RetroPreprocessConfig)},
        "retro_gpt_seq_length": length,
        "retro_gpt_seed": training.seed,
        "retro_gpt_global_batch_size": training.global_batch_size,
        "retro_gpt_eval_interval": training.eval_interval,
        "retro_gpt_eval_iters": training.eval_iters,
        "retro_gpt_train_samples": training.train_samples,
        "retro_gpt_valid_samples": counts[1],
        "retro_gpt_test_samples": counts[2],
        **{
            GPT + field.name: getattr(part, field.name)
            for part in parts
            for field in dataclasses.fields(part)
            if field.name in known and getattr(part, field.name) != field.default
        },
        "retro_gpt_split": data.split,
        "retro_neighbor_dirs": {},
    }


def gpt_settings(config: RetroPreprocessConfig, settings: Settings) -> Settings:
    """Return the settings of the GPT's data, from ``--retro-gpt-...`` or else from training flags.
    If any tokenizer flag of the GPT is given, the training flags describe another tokenizer, and
    are ignored."""
    used: Settings = {}
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), field.name.removeprefix(GPT)
        if field.name.startswith(GPT) and value not in (None, ()) and name != "chunk_length":
            used[name] = Setting(value, f"flag --{field.name.replace('_', '-')}")
    shared = sample_fields() | ({"train_iters"} if "train_samples" not in used else set())
    if not used.keys() & TOKENIZER_FIELDS:
        shared |= TOKENIZER_FIELDS
    used = {name: settings[name] for name in shared & settings.keys()} | used
    for name in used.keys() & PATHS:
        words = tuple(_absolute(str(word)) for word in used[name].value)
        used[name] = Setting(words, used[name].origin)
    for name in used.keys() & {*FILES, *_LISTS}:
        path = str(used[name].value)
        known = os.path.abspath(path) if os.path.exists(path) else path
        used[name] = Setting(known, used[name].origin)
    iters, batch = used.pop("train_iters", None), used.get("global_batch_size")
    if iters is not None and batch is not None:
        used.setdefault("train_samples", Setting(iters.value * batch.value, iters.origin))
    return used


def _settings_of_bert(config: RetroPreprocessConfig, settings: Settings) -> Settings:
    """Return the training settings that do not describe the GPT's data, and so may describe the
    embedder's model."""
    used = gpt_settings(config, settings)
    return {
        name: setting
        for name, setting in settings.items()
        if name not in used or used[name].origin != setting.origin
    }


def _absolute(word: str) -> str:
    """Return an argument of ``--data-path``, with a local path made absolute."""
    path, at, bounds = word.partition("@")
    return f"{os.path.abspath(path)}{at}{bounds}" if idx_path(path).is_file() else word


def gpt_run(settings: Settings) -> Run:
    """Return the run of the GPT whose samples get neighbours, given settings by training field
    name. Raises ConfigError if a required setting is missing or settings contradict each other."""
    for name, what in _NEEDED.items():
        if name not in settings:
            flag = "--" + (GPT + name).replace("_", "-")
            raise ConfigError(f"missing {flag}: the {what}")
    fixed = {name: Setting(value, _ORIGIN) for name, value in _SMALLEST.items()}
    fixed["max_position_embeddings"] = settings["seq_length"]
    return run_of(settings | fixed, 1)


def project_run(project: RetroProject, settings: Settings | None = None) -> Run:
    """Return the run of the GPT whose samples get neighbours, from a project's configuration. Only
    the cache folders are taken from the training flags in ``settings``."""
    caches = {name: settings[name] for name in _CACHES if settings and name in settings}
    known = project.data_settings()
    return gpt_run({name: known[name] for name in known if not name.startswith("retro_")} | caches)
