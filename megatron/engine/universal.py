"""Parameters as DeepSpeed's engines name them, and what ``ds_to_universal`` needs to know of them.

Engines name a parameter by its layer's index in the layer list (``3.mlp.up.weight``,
``tied_modules.embed.weight``). ``universal_checkpoint_info`` contains lists of regular expressions
for these names, of which at most one of a list may match, and each must match; so each is one name,
escaped and anchored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.checkpoint.files import NotFiniteError, save_tensors, write_json
from megatron.checkpoint.folder import MEGATRON_TRACKER, TRACKER, replace_folder, tag
from megatron.checkpoint.source import TOKENIZER
from megatron.config import ModelConfig, ParallelConfig
from megatron.engine.deepspeed_json import Json
from megatron.engine.deepspeed_patches import save_errors_at_end
from megatron.engine.saving import CheckpointWriter, SaveJob, kernel_state, ruined, shareable
from megatron.engine.state import holders
from megatron.engine.train_engine import TrainEngine
from megatron.model.layer_list import LayerSpec, LayerStack, canonical_parameters
from megatron.parallel.random import random_state
from megatron.parallel.shard import Cut, Shard, shard_of
from megatron.util.files import sync_path

RUN, COUNTERS = "run_config", "run_state"
"""Keys of config.json's and state.json's content in the client state, which a conversion by
DeepSpeed keeps."""
UNIVERSAL_VERSION = 0.4
"""DeepSpeed's version of the universal format."""
_AFFINE_VERSION = 1


class Registered(NamedTuple):
    """A parameter under its name in an engine's module, cut over tensor-parallel ranks."""

    name: str
    shard: Shard


def registered_parameters(layers: Sequence[LayerSpec]) -> dict[str, list[Registered]]:
    """The module's parameters by canonical name, in the order of the whole layer list. A canonical
    parameter is usually one of the module's; with fewer key and value heads than ranks, queries are
    one and keys and values another."""
    with torch.device("meta"):
        stack = LayerStack(layers, ParallelConfig())
    found: dict[str, list[Registered]] = {}
    canonical = canonical_parameters(stack, layers)
    for (registered, param), (name, _) in zip(stack.named_parameters(), canonical, strict=True):
        found.setdefault(name, []).append(Registered(registered, shard_of(param)))
    tied = {layer.tied_key: place for place, layer in reversed([*enumerate(layers)])}

    def place(name: str) -> int:
        """Tied modules are registered first, and belong where they are first used."""
        first, second, *_ = found[name][0].name.split(".")
        return tied[second] if first == "tied_modules" else int(first)

    return {name: found[name] for name in sorted(found, key=place)}


def universal_info(
    parameters: Iterable[Registered], model: ModelConfig, size: int
) -> dict[str, Any]:
    """``universal_checkpoint_info`` of an engine with these parameters (of the whole layer list)
    and this tensor-parallel size."""
    replicated, rows, vocabulary, halves, tied = [], [], [], [], []
    fused: list[dict[str, Any]] = []
    widths: dict[str, list[list[int]]] = {}
    shared: dict[str, dict[str, Any]] = {}
    for part in parameters:
        cut, pattern = part.shard.over("tensor"), f"^{re.escape(part.name)}$"
        if part.name.startswith("tied_modules."):
            tied.append(pattern)
        if cut is None:
            replicated.append(pattern)
            continue
        if cut.unpadded is not None:
            vocabulary.append(pattern)
        if cut.copies > 1:
            shared[pattern] = _affine_map(part.shard, cut, size)
        elif cut.dim == 1:
            rows.append(pattern)
        elif cut.held is None and len(cut.parts) == 2 and cut.parts[0] == cut.parts[1]:
            halves.append(pattern)
        elif cut.held is None and cut.parts:
            shape = (cut.parts, *part.shard.full_shape[1:])
            fused.append({"patterns": [pattern], "shape": shape, "partition_dim": 0})
            widths[pattern] = [[length // size] * size for length in cut.parts]
    return {
        "universal_checkpoint_version": UNIVERSAL_VERSION,
        "tp_replicated_parameter_patterns": replicated,
        "parameter_with_row_parallelism_patterns": rows,
        "vocabulary_parameter_patterns": vocabulary,
        "parameter_with_2_sub_params_cat_dim_0": halves,
        "parameter_with_sub_params": fused,
        "sub_param_shard_widths": widths,
        "pipeline_replicated_parameter_patterns": tied,
        "affine_map": {"version": _AFFINE_VERSION, "params": shared},
        "original_vocab_size": model.vocabulary.size,
        "padded_vocab_size": model.vocabulary.padded,
    }


def _affine_map(shard: Shard, cut: Cut, size: int) -> dict[str, Any]:
    """Where each rank's rows are, for parameters of which several ranks have the same share: no
    list of patterns expresses that (DeepSpeed's ``checkpoint/affine.py``)."""
    assert cut.dim == 0 and cut.held is not None
    inner = math.prod(shard.full_shape[1:])
    strides = [math.prod(shard.full_shape[axis + 1 :]) for axis in range(len(shard.full_shape))]
    # The parameter consists of the held parts only: its rows count from the first of them.
    first = sum(cut.parts[: cut.held[0]])
    ranks = {}
    for rank in range(size):
        pieces, taken, place = [], 0, {"tensor": (rank, size)}
        neighbours = range(rank - rank % cut.copies, rank - rank % cut.copies + cut.copies)
        for start, length in shard.ranges(place)[0]:
            pieces.append(
                {
                    "shape": [length, *shard.full_shape[1:]],
                    "source": [(start - first) * inner, strides],
                    "dest": [taken * inner, strides],
                    "locations": list(neighbours),
                }
            )
            taken += length
        ranks[rank] = {"shard_shape": list(shard.local_shape(place)), "pieces": pieces}
    held = sum(cut.parts[part] for part in cut.held)
    return {"logical_shape": [held, *shard.full_shape[1:]], "ranks": ranks}


class EngineFolderWriter(CheckpointWriter):
    """Writes checkpoints of one run as DeepSpeed's engine does."""

    def check(self, job: SaveJob) -> None:
        found = ruined(self.engine)
        if found is not None:
            raise NotFiniteError(found)

    def write_own(self, job: SaveJob) -> None:
        write_engine_folder(self.engine, job.folder, job.state, self._universal_info)

    @cached_property
    def _universal_info(self) -> Json:
        engine = self.engine
        found = registered_parameters(engine.layers).values()
        parts = [part for parts in found for part in parts]
        return universal_info(parts, engine.config.model, engine.mesh.tensor.size)

    def complete(self, job: SaveJob) -> int:
        folder, final = job.folder, self.folder / tag(job.iteration)
        for name, content in self.descriptions(job).items():
            write_json(folder / name, content)
        self.save_tokenizer(folder / TOKENIZER)
        files = [path for path in folder.rglob("*") if path.is_file()]
        for path in files:
            sync_path(path)
        size = sum(path.stat().st_size for path in files)
        trackers = {MEGATRON_TRACKER: str(job.iteration), TRACKER: final.name}
        replace_folder(folder, final, trackers)
        return size


def checkpoint_writer(
    engine: TrainEngine,
    content: Json,
    save_tokenizer: Callable[[Path], None],
    data: Sequence[Json] = (),
) -> CheckpointWriter:
    """The writer of a run's ``--checkpoint-format``; see :class:`CheckpointWriter`."""
    engine_folders = engine.config.checkpoint.checkpoint_format == "deepspeed"
    writer = EngineFolderWriter if engine_folders else CheckpointWriter
    return writer(engine, content, save_tokenizer, data)


def write_engine_folder(
    engine: TrainEngine, folder: Path, state: dict[str, Any], info: Json
) -> None:
    """Writes the engine's state into an existing folder; every rank must call it. ``state`` are the
    counters of :class:`megatron.checkpoint.source.Source`, ``info`` is from :func:`universal_info`.
    Raises OSError if a file cannot be written."""
    rank = engine.mesh.world.rank
    client: dict[str, Any] = {
        "iteration": state["iteration"],
        "consumed_samples": state["consumed_samples"],
        COUNTERS: shareable(state),
        RUN: shareable(engine.config.to_dict()),
        "universal_checkpoint_info": info,
    }
    if engine.stage == 0:
        updated = dict(zip(engine.trained, holders(engine), strict=True))
        named = engine.engine.module.named_parameters()
        names = {updated[param]: name for name, param in named if param in updated}
        client["optimizer_parameters"] = [
            names[tensor] for group in engine.optimizer.param_groups for tensor in group["params"]
        ]
    with save_errors_at_end(engine.engine):
        engine.engine.save_checkpoint(
            str(folder.parent), tag=folder.name, client_state=client, save_latest=False
        )
    if engine.config.checkpoint.save_rng:
        save_tensors(random_state(), folder / f"random-{rank:05d}.safetensors")
    if history := kernel_state(engine):
        tensors = {key: values.contiguous() for key, values in history.items()}
        save_tensors(tensors, folder / f"float8-{rank:05d}.safetensors")
