"""The run of a GPT whose samples get neighbours: data, tokenizer, numbers of samples."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from megatron.config import ConfigError, DataConfig, Setting, Settings, TokenizerConfig
from megatron.config.kinds import kind_classes
from megatron.data.indexed.dataset import idx_path
from megatron.data.kinds.retro.project import GPT
from megatron.retro.config import RetroPreprocessConfig
from megatron.training.run import Run, run_of

_ORIGIN = "tools/retro/preprocess_data.py"
_SMALLEST = {
    **{"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "micro_batch_size": 1},
    **{"lr": 1.0, "torch_compile": "off"},
}
"""A model whose weights nobody makes: only its data are read."""
_LENGTHS = frozenset(
    {"seq_length", "seed", "train_samples", "train_iters", "global_batch_size", "eval_interval",
     "eval_iters", "rampup_batch_size"}
)  # fmt: skip
_PATHS = frozenset({"data_path", "train_data_path", "valid_data_path", "test_data_path"})


def gpt_settings(config: RetroPreprocessConfig, settings: Settings) -> Settings:
    """The settings of the GPT's data: those of ``--retro-gpt-...``, and for the others those of the
    flags of training. Tokenizer flags of training are another tokenizer's where one of the GPT's is
    given."""
    tokenizer = {field.name for field in dataclasses.fields(TokenizerConfig)}
    own: Settings = {}
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), field.name.removeprefix(GPT)
        if field.name.startswith(GPT) and value not in (None, ()) and name != "chunk_length":
            own[name] = Setting(value, f"flag --{field.name.replace('_', '-')}")
    data: list[Any] = [DataConfig, *kind_classes().values()]
    shared = {field.name for cls in data for field in dataclasses.fields(cls)} | _LENGTHS
    if not own.keys() & tokenizer:
        shared |= tokenizer
    base = {name: settings[name] for name in shared & settings.keys()}
    if "train_samples" in own:
        base.pop("train_iters", None)
    found = base | own
    for name in found.keys() & _PATHS:
        setting = found[name]
        words = tuple(_absolute(str(word)) for word in setting.value)
        found[name] = Setting(words, setting.origin)
    return found


def _absolute(word: str) -> str:
    """A word of ``--data-path``; that of local files as it is understood in every folder."""
    path, at, bounds = word.partition("@")
    return f"{os.path.abspath(path)}{at}{bounds}" if idx_path(path).is_file() else word


def gpt_run(settings: Settings) -> Run:
    """The run whose samples get neighbours, of settings by the field names of training. ConfigError
    if one that is needed is missing or contradicts others."""
    if "seq_length" not in settings:
        raise ConfigError("missing --retro-gpt-seq-length: the tokens of a sample")
    if not settings.keys() & {"train_samples", "train_iters"}:
        raise ConfigError("missing --retro-gpt-train-samples: the samples that get neighbours")
    fixed = {name: Setting(value, _ORIGIN) for name, value in _SMALLEST.items()}
    fixed["max_position_embeddings"] = settings["seq_length"]
    return run_of(settings | fixed, 1)
