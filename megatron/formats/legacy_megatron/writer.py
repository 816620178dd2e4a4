"""Writes any checkpoint in Megatron's old layout (checkpoint version 3): weights, no optimizer."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.folder import MEGATRON_TRACKER, replace_folder, unfinished_folder
from megatron.checkpoint.source import DTYPES, TOKENIZER, Source
from megatron.config import ModelConfig, TokenizerConfig
from megatron.formats.deepspeed_folders.naming import whole_shards
from megatron.formats.legacy_megatron.arguments import arguments_of_model, divided_sizes
from megatron.formats.legacy_megatron.names import (
    HEAD_COPY,
    kv_to_megatron,
    names_of_family,
    qkv_to_megatron,
    to_megatron,
)
from megatron.formats.legacy_megatron.rank_files import (
    MODEL_FILES,
    Rank,
    iteration_folder,
    rank_folder,
)
from megatron.formats.legacy_megatron.stages import stages_of
from megatron.util.files import sync, sync_path
from megatron.util.progress import progress_bar

VERSION = 3.0
"""The ``checkpoint_version`` that is written."""


def write_megatron(
    source: Source,
    save: Path,
    tensor_size: int = 1,
    pipeline_size: int = 1,
    iteration: int | None = None,
    dtype: str = "float32",
    progress: Callable[[str], None] = lambda line: None,
    check: Callable[[Path], None] | None = None,
) -> Path:
    """Writes the weights as Megatron-LM's ranks would, into Megatron's ``--load``; one rank's file
    is in memory at a time. Without ``iteration`` it writes ``release``, weights to start from.
    ``check`` gets the folder before it has its name, and undoes the export by an error. Returns the
    folder. Raises ValueError if Megatron has no such network, or the sizes do not divide it. Raises
    CheckpointError if the source is damaged, or the checkpoint exists already. Raises OSError if a
    file cannot be written; nothing is left behind.
    """
    model = source.model.with_vocabulary(source.model.vocabulary.size, max(tensor_size, 1))
    arguments = arguments_of_model(model)
    check_sizes(model, tensor_size, pipeline_size)
    surplus = sorted(set(source.names()) - whole_shards(model).keys())
    if surplus:
        raise ValueError(f"{source.folder} has {surplus[0]}, which this export does not write")
    folder = save / iteration_folder(iteration)
    if folder.exists():
        raise CheckpointError(f"{folder} exists already; remove it, or give another folder")
    with unfinished_folder(folder) as partial:
        arguments |= _copied_tokenizer(source, folder, partial)
        arguments |= {
            "tensor_model_parallel_size": tensor_size,
            "pipeline_model_parallel_size": pipeline_size,
            "pipeline_model_parallel_split_rank": stages_of(model, pipeline_size).split,
            "virtual_pipeline_model_parallel_size": None,
            "padded_vocab_size": model.vocabulary.padded,
            "params_dtype": DTYPES[dtype],
            "fp16": dtype == "float16",
            "bf16": dtype == "bfloat16",
            "iteration": iteration or 0,
            "consumed_train_samples": source.state.get("consumed_samples", 0),
            "consumed_valid_samples": 0,
        }
        sizes = Rank(pipeline_size, tensor_size)
        ranks = list(itertools.starmap(Rank, itertools.product(*map(range, sizes))))
        for rank in progress_bar("writing", ranks, unit=" ranks"):
            content = {
                "args": argparse.Namespace(**arguments),
                "checkpoint_version": VERSION,
                "iteration": iteration or 0,
                "model": _nested(_rank(source, model, rank, sizes, DTYPES[dtype])),
            }
            name = f"{rank_folder(rank.tensor, rank.pipeline, pipeline_size)}/{MODEL_FILES[0]}"
            _save(content, partial / name)
            progress(f"{name}: {(partial / name).stat().st_size / 1e6:,.1f} MB")
        if check is not None:
            check(partial)
        trackers = {MEGATRON_TRACKER: "release" if iteration is None else str(iteration)}
        replace_folder(partial, folder, trackers)
    return folder


def check_sizes(model: ModelConfig, tensor_size: int, pipeline_size: int) -> None:
    """Refuses sizes that Megatron refuses. Raises ValueError naming the flag and the number that it
    must divide."""
    for name, value in divided_sizes(model).items():
        if tensor_size < 1 or value % tensor_size:
            why = ": Megatron does not copy key and value heads to several ranks"
            raise ValueError(
                f"--target-tensor-parallel-size {tensor_size} must divide {name} {value}"
                f"{why if name == 'num_query_groups' else ''}"
            )
    stages_of(model, pipeline_size)


def _rank(
    source: Source, model: ModelConfig, rank: Rank, sizes: Rank, dtype: torch.dtype
) -> dict[str, Tensor]:
    shards, names = whole_shards(model), names_of_family(model.family)
    stages = stages_of(model, sizes.pipeline)

    def share(name: str) -> Tensor:
        coordinates = {"tensor": (rank.tensor, sizes.tensor)}
        values = shards[name].cut(source.tensor(name), coordinates)
        return _megatron_order(name, values, model, sizes.tensor).to(dtype, copy=True)

    found = {}
    for name in shards:
        theirs = to_megatron(name, names=names)
        assert theirs is not None, name
        if rank.pipeline in stages.of(theirs):
            placed = to_megatron(name, stages.first_block(theirs, rank.pipeline), names)
            assert placed is not None
            found[placed] = share(name)
    if model.head == "lm" and model.embedding.tied and 0 < rank.pipeline == sizes.pipeline - 1:
        found[HEAD_COPY] = share("embedding.word_embeddings.weight")
    return found


def _megatron_order(name: str, share: Tensor, model: ModelConfig, size: int) -> Tensor:
    attention = model.attention
    heads, groups = attention.num_attention_heads // size, attention.num_query_groups // size
    if ".attention.qkv." in name:
        return qkv_to_megatron(share, VERSION, heads, groups, attention.kv_channels)
    if ".cross_attention.kv." in name:
        return kv_to_megatron(share, VERSION, groups, attention.kv_channels)
    return share


def _nested(weights: dict[str, Tensor]) -> dict[str, Any]:
    """Megatron's dictionaries: every level of an embedding, and two levels of the rest, after which
    names have dots (``language_model`` > ``encoder`` > ``layers.0.mlp.dense_h_to_4h.weight``)."""
    nested: dict[str, Any] = {}
    for name, values in weights.items():
        if name.startswith("language_model.embedding."):
            levels = name.split(".")
        elif name.startswith("language_model."):
            levels = name.split(".", 2)
        else:
            levels = name.split(".", 1)
        place = nested
        for level in levels[:-1]:
            place = place.setdefault(level, {})
        place[levels[-1]] = values
    return nested


def _copied_tokenizer(source: Source, folder: Path, partial: Path) -> dict[str, Any]:
    """Arguments that name the tokenizer, whose files are copied where there are any."""
    config = source.tokenizer or TokenizerConfig()
    named = {
        name: getattr(config, name)
        for name in (
            "tokenizer_type", "vocab_file", "merge_file", "tokenizer_model", "vocab_size",
            "vocab_extra_ids",
        )
    }  # fmt: skip
    if config.tokenizer_type == "IdTokenizer":
        return named | {"tokenizer_type": None}  # it stands for one that is not known
    if config.tokenizer_type not in (None, "HFTokenizer", "HuggingFaceTokenizer"):
        return named
    if source.copy_tokenizer(partial / TOKENIZER):
        place = str((folder / TOKENIZER).resolve())
    elif config.tokenizer_model:
        place = config.tokenizer_model
    else:
        return named
    return named | {
        "tokenizer_type": "PretrainedFromHF",
        "tokenizer_name_or_path": place,
        "tokenizer_model": place,
    }


def _save(content: dict[str, Any], path: Path) -> None:
    path.parent.mkdir()
    with open(path, "wb") as file:
        torch.save(content, file)
        sync(file)
    sync_path(path.parent)
