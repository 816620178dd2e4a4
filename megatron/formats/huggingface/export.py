"""Export of a checkpoint as a Hugging Face model, one shard at a time."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.files import CheckpointError, read_json, write_json
from megatron.checkpoint.source import Source
from megatron.config.features import features
from megatron.formats.huggingface import architecture_of, departure
from megatron.formats.huggingface.entries import Parameter
from megatron.formats.huggingface.tasks import Task
from megatron.formats.tensors import DTYPES, finite, save_tensors
from megatron.formats.transformers_folder import load_folder
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
    """Write config.json, generation_config.json, safetensors and the tokenizer's files into an
    empty folder, with at most one shard in memory. ``architecture`` is the ``model_type`` to write,
    see :func:`architecture_of`. Raises ValueError if the model does not fit the architecture.
    Raises CheckpointError if the checkpoint lacks parameters or has a value that is not finite in
    ``dtype``, and OSError if a file cannot be written."""
    model = source.model
    form = architecture_of(model, architecture)
    if architecture is None and (why := departure(model)):
        progress(f"written as {form.title}: {why}")
    parameters = list(form.parameters(model))
    expected, present = {parameter.ours for parameter in parameters}, set(source.names())
    left_out = tuple(part for feature in features().values() for part in feature.only_trained)
    present = {name for name in present if not name.startswith(left_out)}
    if present != expected:
        missing, foreign = sorted(expected - present), sorted(present - expected)
        raise CheckpointError(
            f"{source.folder} differs from its configuration: "
            f"missing {', '.join(missing) or 'nothing'}; unexpected {', '.join(foreign) or 'none'}"
        )
    if form.ahead is not None:
        parameters = list(form.ahead.repeating(parameters, model))
    task = form.task_of(model)
    tokens, sample = _copy_tokenizer(source, folder, task, progress)
    stored = DTYPES[dtype]
    constants = {name: values.to(stored) for name, values in form.constants(model).items()}
    _write_weights(source, folder, parameters, stored, max_shard_bytes, progress, constants)
    content = form.config(model) | {"torch_dtype": dtype, **task.settings} | tokens
    write_json(folder / "config.json", content)
    generation = folder / "generation_config.json"
    if task.generates and not generation.exists():
        write_json(generation, tokens)
    elif generation.exists():
        names = [name for name in ("eos_token_id", "use_cache") if tokens.get(name) is not None]
        settings = read_json(generation, lenient=True)
        write_json(generation, settings | {name: tokens[name] for name in names})
    sync_path(folder)
    if sample is not None:
        loaded = _tokenizer(folder)
        if loaded(_SAMPLE)["input_ids"] != sample:
            progress(
                f"warning: in a folder with model_type {form.model_type}, AutoTokenizer makes a "
                f"{type(loaded).__name__} of the tokenizer's files, which gives other tokens; load "
                "them by transformers.PreTrainedTokenizerFast, or name another --architecture"
            )
    count = sum(math.prod(source.shape(each.ours)) for each in parameters)
    tensors = sum(len(each.theirs) for each in parameters)
    progress(f"{form.class_of(model)}, {count:,} parameters in {tensors} tensors, {dtype}")


def _write_weights(
    source: Source,
    folder: Path,
    parameters: Sequence[Parameter],
    dtype: torch.dtype,
    max_shard_bytes: int,
    progress: Callable[[str], None],
    constants: dict[str, Tensor],
) -> None:
    sizes = {
        parameter.ours: math.prod(source.shape(parameter.ours)) * dtype.itemsize
        for parameter in parameters
    }
    shards = plan_shards(parameters, sizes, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, members in enumerate(shards, 1):
        path = folder / "model.safetensors"
        if len(shards) > 1:
            path = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, Tensor] = dict(constants) if number == 1 else {}
        for parameter in progress_bar(f"writing {path.name}", members, unit=" parameters"):
            stored = torch.float32 if parameter.entry.exact else dtype
            values = finite(parameter.ours, source.tensor(parameter.ours), stored, source.folder)
            tensors |= parameter.to_hf(values)
        save_tensors(tensors, path, {"format": "pt"})
        sync_path(path)
        weight_map |= dict.fromkeys(tensors, path.name)
        progress(f"{path.name}: {sum(sizes[member.ours] for member in members) / 1e6:,.1f} MB")
    if len(shards) > 1:
        total = sum(sizes.values()) + sum(values.nbytes for values in constants.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)


def plan_shards(
    parameters: Sequence[Parameter], sizes: dict[str, int], max_shard_bytes: int
) -> list[list[Parameter]]:
    """Divide the parameters, in order, into shards of at most ``max_shard_bytes``. A larger
    parameter gets its own shard. ``sizes`` has the size in bytes of each canonical name."""
    shards: list[list[Parameter]] = [[]]
    filled = 0
    for parameter in parameters:
        size = sizes[parameter.ours]
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(parameter)
        filled += size
    return shards


_SAMPLE = "The 3 7 59 naïve: def f(x):\n\treturn 東京  1024\n"
"""Text whose token ids are compared to check a copied tokenizer."""


def _copy_tokenizer(
    source: Source, folder: Path, task: Task, progress: Callable[[str], None]
) -> tuple[dict[str, Any], list[int] | None]:
    """Copy the tokenizer's files. Return config.json's keys for special tokens, and the token ids
    of :data:`_SAMPLE`, or None if there is no tokenizer."""
    copied, sample = folder / "tokenizer", None
    has_tokenizer = source.copy_tokenizer(copied)
    names = sorted(path.name for path in copied.glob("*") if path.is_file())
    for name in names:
        os.replace(copied / name, folder / name)
        sync_path(folder / name)
    shutil.rmtree(copied, ignore_errors=True)
    if has_tokenizer:
        progress(f"tokenizer: {', '.join(names)}")
        loaded = _tokenizer(folder)
        if task.fit_tokenizer(folder, loaded):
            loaded = _tokenizer(folder)
        tokens, sample = task.special_tokens(loaded, source), loaded(_SAMPLE)["input_ids"]
    else:
        progress(f"no tokenizer: {source.folder} has none, so there are no tokenizer files to copy")
        tokens = task.end_only(source)
    # Keep several end-of-text tokens, as Llama 3 has.
    known, ids = source.generation, [name for name in tokens if name.endswith("_token_id")]
    tokens |= {name: known[name] for name in ids if known.get(name) is not None}
    return tokens, sample


def _tokenizer(folder: Path) -> Any:
    """Return the tokenizer that AutoTokenizer creates from a folder. If there is a config.json,
    transformers 5 selects some classes by model_type (Qwen2) and ignores the tokenizer's files."""
    return load_folder(folder, "the tokenizer in")
