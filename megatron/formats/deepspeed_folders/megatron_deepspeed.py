"""Write the weights of any checkpoint in Megatron-DeepSpeed's format, without optimizer state.

::

    global_step<N>/mp_rank_<T>_model_states.pt                         of a tensor rank, no experts
    global_step<N>/layer_<L>_expert_<E>_mp_rank_<T>_model_states.pt    expert E of the L-th layer
    latest                                                             names the folder

Stock DeepSpeed's engine loads it (``deepspeed/runtime/engine.py``: ``load_moe_state_dict``) into
the model of a run with ``--no-pipeline-parallel``. Experts are not tensor-parallel there. Each
tensor rank has files of all experts, as ranks along the expert axis can be its neighbours.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.folder import TRACKER, tag
from megatron.checkpoint.source import Source
from megatron.config import ModelConfig
from megatron.formats.deepspeed_folders.universal import DEEPSPEED_VERSION
from megatron.formats.features import whole_shards
from megatron.formats.legacy_megatron.arguments import arguments_of_model
from megatron.formats.legacy_megatron.experts import (
    deepspeed_arguments_of_experts,
    deepspeed_expert_name,
    is_of_experts,
    one_expert,
)
from megatron.formats.legacy_megatron.names import to_megatron
from megatron.formats.legacy_megatron.writer import (
    VERSION,
    check_sizes,
    nested,
    new_folder,
    share_of,
)
from megatron.formats.tensors import DTYPES
from megatron.util.files import sync_path
from megatron.util.progress import progress_bar

_BLOCKS = "language_model.encoder."


def write_megatron_deepspeed(
    source: Source,
    save: Path,
    tensor_size: int = 1,
    dtype: str = "float32",
    progress: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write the weights for Megatron-DeepSpeed's ``--load``, and return the checkpoint folder.
    Raises ValueError if Megatron-DeepSpeed does not support the model, or if the tensor-parallel
    size does not divide it. Raises CheckpointError if the source is damaged or the folder already
    exists, and OSError if a file cannot be written. After an error nothing is left behind."""
    model = source.model.with_vocabulary(source.model.vocabulary.size, max(tensor_size, 1))
    iteration = source.state.get("iteration", 0)
    arguments = arguments_of_model(model, deepspeed_arguments_of_experts) | {
        "tensor_model_parallel_size": tensor_size,
        "pipeline_model_parallel_size": 1,
        "no_pipeline_parallel": True,
    }
    check_sizes(model, tensor_size, 1)
    names = {name: _their_name(name, model) for name in whole_shards(model)}
    folder = save / tag(iteration)
    trackers = {TRACKER: folder.name}
    with new_folder(source, model, folder, arguments, iteration, dtype, trackers) as partial:
        for rank in range(tensor_size):
            weights = {
                theirs: share_of(source.tensor(name), name, model, rank, tensor_size, DTYPES[dtype])
                for name, theirs in progress_bar("writing", names.items(), unit=" parameters")
                if not is_of_experts(name)
            }
            states = _model_states(source.state, nested(weights), arguments, model)
            _save(states, partial / f"mp_rank_{rank:02d}_model_states.pt", progress)
            _write_experts(source, model, partial, rank, DTYPES[dtype], progress)
        sync_path(partial)
    return folder


def _their_name(name: str, model: ModelConfig) -> str:
    """Return Megatron-DeepSpeed's name for a parameter. For experts, it is the first expert's name.
    Raises ValueError if Megatron-DeepSpeed has no such parameter."""
    layers, _, rest = name.partition(".")
    number, _, inner = rest.partition(".")
    if layers == "layers" and (theirs := deepspeed_expert_name(one_expert(inner, 0))):
        return f"{_BLOCKS}layers.{number}.{theirs}"
    theirs = to_megatron(name)
    if theirs is None:
        raise ValueError(f"Megatron-DeepSpeed has no parameter like {name}")
    return theirs


def _write_experts(
    source: Source,
    model: ModelConfig,
    folder: Path,
    rank: int,
    dtype: torch.dtype,
    progress: Callable[[str], None],
) -> None:
    layers: dict[str, dict[str, Tensor]] = {}
    for name in whole_shards(model):
        if is_of_experts(name):
            layers.setdefault(name.partition(".mlp.")[0], {})[name] = source.tensor(name)
    for place, (layer, tensors) in enumerate(layers.items()):
        for number in range(len(next(iter(tensors.values())))):
            content = {}
            for name, values in tensors.items():
                inner = one_expert(name.removeprefix(f"{layer}."), number)
                theirs = f"{_BLOCKS}{layer}.{deepspeed_expert_name(inner)}"
                content[theirs] = values[number].to(dtype, copy=True)
            file = f"layer_{place}_expert_{number}_mp_rank_{rank:02d}_model_states.pt"
            _save(content, folder / file, progress)


def _model_states(
    state: Mapping[str, Any], module: dict[str, Any], arguments: dict[str, Any], model: ModelConfig
) -> dict[str, Any]:
    """Return the content of a model states file: ``module``, and the client state and other values
    that a loader requires."""
    shards = whole_shards(model)
    counts = [shards[n].full_shape[0] for n in shards if n.endswith(".mlp.experts.up.weight")]
    iteration, samples = state.get("iteration", 0), state.get("consumed_samples", 0)
    return {
        "module": module,
        "num_experts": counts,
        "dp_world_size": 1,
        "mp_world_size": arguments["tensor_model_parallel_size"],
        "global_steps": iteration,
        "global_samples": samples,
        "skipped_steps": 0,
        "iteration": iteration,
        "checkpoint_version": VERSION,
        "args": argparse.Namespace(**arguments),
        "ds_version": DEEPSPEED_VERSION,
    }


def _save(content: dict[str, Any], path: Path, progress: Callable[[str], None]) -> None:
    torch.save(content, path)
    sync_path(path)
    progress(f"{path.name}: {path.stat().st_size / 1e6:,.1f} MB")
