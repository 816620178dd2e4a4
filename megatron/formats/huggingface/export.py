"""Writes a checkpoint as a model of Hugging Face, a shard at a time."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron.checkpoint.files import CheckpointError, read_json, write_json
from megatron.checkpoint.source import DTYPES, Source
from megatron.formats.huggingface.registry import architecture_of, departure
from megatron.formats.huggingface.table import Parameter
from megatron.util.files import sync_path
from megatron.util.progress import progress_bar


def write_model(
    source: Source,
    folder: Path,
    dtype: str,
    max_shard_bytes: int,
    architecture: str | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> None:
    """Writes config.json, generation_config.json, safetensors and the tokenizer's files.

    No more than a shard is in memory at once.

    Args:
        source: a checkpoint of any format.
        folder: an existing, empty folder.
        dtype: number format of the weights, one of :data:`DTYPES`.
        max_shard_bytes: largest size of a safetensors file; a parameter larger than that has a
            file of its own.
        architecture: ``model_type`` to write; see :func:`architecture_of`.
        progress: called with a line about each step.

    Raises:
        ValueError: the model fits no known architecture, or not that one.
        CheckpointError: the checkpoint does not hold the parameters of its configuration, or a
            file cannot be written.
    """
    model = source.model
    form = architecture_of(model, architecture)
    if architecture is None and (why := departure(model)):
        progress(f"written as {form.title}: {why}")
    parameters = list(form.parameters(model))
    _check_names(source, {parameter.ours for parameter in parameters})
    tokens, sample = _copy_tokenizer(source, folder, progress)
    _write_weights(source, folder, parameters, DTYPES[dtype], max_shard_bytes, progress)
    content = form.config(model) | {"torch_dtype": dtype, "use_cache": True} | tokens
    write_json(folder / "config.json", content)
    if not (folder / "generation_config.json").exists():
        write_json(folder / "generation_config.json", tokens)
    sync_path(folder)
    if sample is not None:
        name, now = _sample(folder)
        if now != sample:
            progress(
                f"warning: in a folder with model_type {form.model_type}, AutoTokenizer makes "
                f"{name} of the tokenizer's files, which gives other tokens than they stand for; "
                "load them by transformers.PreTrainedTokenizerFast, or name another --architecture"
            )
    progress(f"{form.causal_lm}, {len(parameters)} parameters, {dtype}")


def _check_names(source: Source, expected: set[str]) -> None:
    found = set(source.names())
    if found != expected:
        missing, foreign = sorted(expected - found), sorted(found - expected)
        raise CheckpointError(
            f"{source.folder} does not hold what its configuration says: "
            f"missing {', '.join(missing) or 'nothing'}; not expected {', '.join(foreign) or 'any'}"
        )


def _write_weights(
    source: Source,
    folder: Path,
    parameters: Sequence[Parameter],
    dtype: torch.dtype,
    max_shard_bytes: int,
    progress: Callable[[str], None],
) -> None:
    sizes = {
        parameter.ours: math.prod(source.shape(parameter.ours)) * dtype.itemsize
        for parameter in parameters
    }
    shards = list(plan_shards(parameters, sizes, max_shard_bytes))
    weight_map: dict[str, str] = {}
    for number, members in enumerate(shards, 1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        what = f"writing {name}"
        for parameter in progress_bar(what, members, unit=" parameters"):
            tensors |= parameter.to_hf(source.tensor(parameter.ours).to(dtype))
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
        sync_path(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from None


def _copy_tokenizer(
    source: Source, folder: Path, progress: Callable[[str], None]
) -> tuple[dict[str, int | None], list[int] | None]:
    """Copies the files; returns the ids of the special tokens for config.json, and what the
    tokenizer makes of a sample, None without one."""
    copied = folder / "tokenizer"
    if not source.copy_tokenizer(copied):
        progress(f"no tokenizer: {source.folder} has none, so there are no tokenizer files to copy")
        return {"bos_token_id": None, "eos_token_id": None}, None
    names = sorted(path.name for path in copied.iterdir() if path.is_file())
    for name in names:
        os.replace(copied / name, folder / name)
        sync_path(folder / name)
    shutil.rmtree(copied)
    progress(f"tokenizer: {', '.join(names)}")
    tokens = special_tokens(folder)
    generation = folder / "generation_config.json"
    if generation.is_file():
        # It may know several ends, as that of Llama 3 does.
        known = read_json(generation)
        tokens |= {name: known[name] for name in tokens if known.get(name) is not None}
    return tokens, _sample(folder)[1]


def _sample(folder: Path) -> tuple[str, list[int]]:
    """Class of the tokenizer that AutoTokenizer finds, and its tokens of a text.

    With a config.json beside the files, transformers 5 takes the class of some kinds of models
    (Qwen2) whatever the files say.
    """
    from transformers import AutoTokenizer  # seconds: only for whoever exports

    loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    text = "The 3 7 59 naïve: def f(x):\n\treturn 東京  1024\n"
    return type(loaded).__name__, loaded(text)["input_ids"]


def special_tokens(tokenizer: Path) -> dict[str, Any]:
    """Ids of the tokens that begin and end a text; documents begin where the last one ended, so
    the end stands in for a missing beginning."""
    from transformers import AutoTokenizer  # seconds: only for whoever exports

    loaded = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    end = loaded.eos_token_id
    begin = end if loaded.bos_token_id is None else loaded.bos_token_id
    return {"bos_token_id": begin, "eos_token_id": end}
