"""Loads a checkpoint as a model on one process, without process groups."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron.checkpoint.source import Source, run_of
from megatron.config import ConfigError, RunConfig, TokenizerConfig
from megatron.families import build_model, family_of
from megatron.model.layer_list import LayerStack
from megatron.model.spec import training_dtype
from megatron.parallel.shard import shard_of
from megatron.tokenizer import Tokenizer, build_tokenizer


def load_model(
    source: Source,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> tuple[LayerStack, RunConfig]:
    """The model of a checkpoint of any layout and format, for inference. By default its dtype is
    that of its training, float32 on a CPU, and its device the accelerator, or the CPU without one.
    Raises CheckpointError if it is damaged. Raises ConfigError if models of its family do not
    generate text."""
    config = run_of(source)
    family = config.model.family
    if not family_of(family).generates:
        raise ConfigError(
            f"{source.folder} has a model of the family {family!r}, which does not generate text"
        )
    device = device or torch.accelerator.current_accelerator(check_available=True)
    device = device or torch.device("cpu")
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else training_dtype(config)
    return model_of(source, dtype, device), config


@torch.no_grad()
def model_of(source: Source, dtype: torch.dtype, device: torch.device) -> LayerStack:
    """The model of an opened checkpoint, in evaluation mode. Raises CheckpointError if the
    checkpoint is damaged or incomplete."""
    source.require_model()
    with device:
        model = build_model(run_of(source).model).to(dtype)
    for name, param in model.canonical_parameters():
        param.copy_(shard_of(param).cut(source.tensor(name)))
    return model.eval().requires_grad_(False)


def load_tokenizer(config: RunConfig, folder: Path) -> Tokenizer:
    """The tokenizer of a run: from its original files, or else from the checkpoint's folder. Raises
    ConfigError if the run had no tokenizer. Raises ValueError if its files have another vocabulary.
    Raises FileNotFoundError if its files were not found."""
    own_folder = folder / "tokenizer"
    try:
        tokenizer = build_tokenizer(config.tokenizer)
    except (FileNotFoundError, ConfigError):
        if not own_folder.is_dir():
            raise
        tokenizer = build_tokenizer(
            TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(own_folder))
        )
    vocab_size = config.model.vocabulary.size
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens, the model of {folder} has "
            f"{vocab_size:,}: the files of {config.tokenizer.tokenizer_type} have changed since"
        )
    return tokenizer
