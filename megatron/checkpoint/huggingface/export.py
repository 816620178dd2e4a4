"""Writes a checkpoint as a model of Hugging Face, a shard at a time."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron.checkpoint.files import CheckpointError, sync_file, sync_folder, write_json
from megatron.checkpoint.huggingface.registry import architecture_of
from megatron.checkpoint.huggingface.table import Parameter
from megatron.checkpoint.reader import CheckpointReader

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Number formats by the name that config.json uses."""


def write_model(
    reader: CheckpointReader,
    folder: Path,
    dtype: str,
    max_shard_bytes: int,
    progress: Callable[[str], None] = lambda line: None,
) -> None:
    """Writes config.json, generation_config.json, safetensors and the tokenizer's files.

    No more than a shard is in memory at once.

    Args:
        reader: the checkpoint.
        folder: an existing, empty folder.
        dtype: number format of the weights, one of :data:`DTYPES`.
        max_shard_bytes: largest size of a safetensors file; a parameter larger than that has a
            file of its own.
        progress: called with a line about each step.

    Raises:
        ValueError: the model fits no known architecture.
        CheckpointError: the checkpoint does not hold the parameters of its configuration, or a
            file cannot be written.
    """
    model = reader.config.model
    architecture = architecture_of(model)
    parameters = list(architecture.parameters(model))
    _check_names(reader, {parameter.ours for parameter in parameters})
    tokens = _copy_tokenizer(reader.folder / "tokenizer", folder, progress)
    _write_weights(reader, folder, parameters, DTYPES[dtype], max_shard_bytes, progress)
    content = architecture.config(model) | {"torch_dtype": dtype, "use_cache": True} | tokens
    write_json(folder / "config.json", content)
    write_json(folder / "generation_config.json", tokens)
    sync_folder(folder)
    progress(f"{content['architectures'][0]}, {len(parameters)} parameters, {dtype}")


def _check_names(reader: CheckpointReader, expected: set[str]) -> None:
    found = set(reader.pieces)
    if found != expected:
        missing, foreign = sorted(expected - found), sorted(found - expected)
        raise CheckpointError(
            f"{reader.folder} does not hold what its config.json says: "
            f"missing {', '.join(missing) or 'nothing'}; not expected {', '.join(foreign) or 'any'}"
        )


def _write_weights(
    reader: CheckpointReader,
    folder: Path,
    parameters: Sequence[Parameter],
    dtype: torch.dtype,
    max_shard_bytes: int,
    progress: Callable[[str], None],
) -> None:
    sizes = {
        parameter.ours: math.prod(reader.pieces[parameter.ours][0].shape) * dtype.itemsize
        for parameter in parameters
    }
    shards = list(plan_shards(parameters, sizes, max_shard_bytes))
    weight_map: dict[str, str] = {}
    for number, members in enumerate(shards, 1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        for parameter in members:
            tensors |= parameter.to_hf(reader.tensor(parameter.ours).to(dtype))
        _save(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
        progress(f"{name}: {sum(sizes[member.ours] for member in members) / 1e6:,.1f} MB")
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)


def plan_shards(
    parameters: Sequence[Parameter], sizes: dict[str, int], max_shard_bytes: int
) -> Iterator[list[Parameter]]:
    """Cuts the parameters, in order, into runs of at most ``max_shard_bytes``.

    Args:
        parameters: what is written.
        sizes: bytes of each, by canonical name.
        max_shard_bytes: a parameter above this is a run of its own.
    """
    run: list[Parameter] = []
    taken = 0
    for parameter in parameters:
        size = sizes[parameter.ours]
        if run and taken + size > max_shard_bytes:
            yield run
            run, taken = [], 0
        run.append(parameter)
        taken += size
    yield run


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
        sync_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from None


def _copy_tokenizer(
    source: Path, folder: Path, progress: Callable[[str], None]
) -> dict[str, int | None]:
    """Copies the files; returns the ids of the special tokens for config.json."""
    if not source.is_dir():
        progress(f"no tokenizer: {source} does not exist, so there are no tokenizer files to copy")
        return {"bos_token_id": None, "eos_token_id": None}
    names = sorted(path.name for path in source.iterdir() if path.is_file())
    for name in names:
        shutil.copyfile(source / name, folder / name)
        sync_file(folder / name)
    progress(f"tokenizer: {', '.join(names)}")
    return special_tokens(source)


def special_tokens(tokenizer: Path) -> dict[str, Any]:
    """Ids of the tokens that begin and end a text; documents begin where the last one ended, so
    the end stands in for a missing beginning."""
    from transformers import AutoTokenizer  # seconds: only for whoever exports

    loaded = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    end = loaded.eos_token_id
    begin = end if loaded.bos_token_id is None else loaded.bos_token_id
    return {"bos_token_id": begin, "eos_token_id": end}
