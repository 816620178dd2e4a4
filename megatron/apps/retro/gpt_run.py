"""The run of a GPT whose samples get neighbours: data, tokenizer, numbers of samples."""

from __future__ import annotations

import dataclasses
import os

from megatron.apps.retro.config import RetroPreprocessConfig
from megatron.config import ConfigError, Setting, Settings
from megatron.config.data import SOURCE_FIELDS
from megatron.data.indexed.dataset import idx_path
from megatron.data.sources import PARTS
from megatron.features.retro.project import (
    FILES,
    GPT,
    PATHS,
    TOKENIZER_FIELDS,
    RetroProject,
    sample_fields,
)
from megatron.run.run import Run, run_of

_ORIGIN = "tools/retro/preprocess_data.py"
_SMALLEST = {
    **{"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "micro_batch_size": 1},
    **{"lr": 1.0, "torch_compile": "off"},
}
"""A model whose weights nobody makes: only its data are read."""
_NEEDED = {
    "seq_length": "tokens of a sample",
    "global_batch_size": "samples of a step of training",
    "train_samples": "training samples, which get neighbours",
}
_LISTS = frozenset(
    name for name in (*SOURCE_FIELDS, "corpora_file") if name.endswith(("_args_path", "_file"))
) | {f"{part}_weighted_split_paths_path" for part in PARTS}
"""Settings that name a file with the names of data."""
_CACHES = ("data_cache_path", "object_storage_cache_path")
"""Flags that no sample depends on."""


def gpt_settings(config: RetroPreprocessConfig, settings: Settings) -> Settings:
    """The settings of the GPT's data: those of ``--retro-gpt-...``, and for the others those of the
    flags of training. Tokenizer flags of training are another tokenizer's where one of the GPT's is
    given. ConfigError if one that is needed is missing."""
    own: Settings = {}
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), field.name.removeprefix(GPT)
        if field.name.startswith(GPT) and value not in (None, ()) and name != "chunk_length":
            own[name] = Setting(value, f"flag --{field.name.replace('_', '-')}")
    shared = sample_fields() | ({"train_iters"} if "train_samples" not in own else set())
    if not own.keys() & TOKENIZER_FIELDS:
        shared |= TOKENIZER_FIELDS
    found = {name: settings[name] for name in shared & settings.keys()} | own
    for name in found.keys() & PATHS:
        words = tuple(_absolute(str(word)) for word in found[name].value)
        found[name] = Setting(words, found[name].origin)
    for name in found.keys() & {*FILES, *_LISTS}:
        path = str(found[name].value)
        known = os.path.abspath(path) if os.path.exists(path) else path
        found[name] = Setting(known, found[name].origin)
    iters, batch = found.pop("train_iters", None), found.get("global_batch_size")
    if iters is not None and batch is not None:
        found.setdefault("train_samples", Setting(iters.value * batch.value, iters.origin))
    return found


def settings_beside_gpt(config: RetroPreprocessConfig, settings: Settings) -> Settings:
    """The settings of training that say nothing of the GPT's data, and so may be another
    model's."""
    used = gpt_settings(config, settings)
    return {
        name: setting
        for name, setting in settings.items()
        if name not in used or used[name].origin != setting.origin
    }


def _absolute(word: str) -> str:
    """A word of ``--data-path``; that of local files as it is understood in every folder."""
    path, at, bounds = word.partition("@")
    return f"{os.path.abspath(path)}{at}{bounds}" if idx_path(path).is_file() else word


def gpt_run(settings: Settings) -> Run:
    """The run whose samples get neighbours, of settings by the field names of training. ConfigError
    if one that is needed is missing or contradicts others."""
    for name, what in _NEEDED.items():
        if name not in settings:
            flag = "--" + (GPT + name).replace("_", "-")
            raise ConfigError(f"missing {flag}: the {what}")
    fixed = {name: Setting(value, _ORIGIN) for name, value in _SMALLEST.items()}
    fixed["max_position_embeddings"] = settings["seq_length"]
    return run_of(settings | fixed, 1)


def project_run(project: RetroProject, settings: Settings | None = None) -> Run:
    """The run whose samples get neighbours, from a project's configuration; of the flags of
    training in ``settings`` the folders of caches."""
    caches = {name: settings[name] for name in _CACHES if settings and name in settings}
    found = project.data_settings()
    return gpt_run({name: found[name] for name in found if not name.startswith("retro_")} | caches)
