"""Writes any checkpoint in this project's own format, on one process, a parameter at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from megatron.checkpoint.files import CheckpointError, write_json
from megatron.checkpoint.folder import complete_tags, file_facts, publish, tag, unfinished_folder
from megatron.checkpoint.index import Piece
from megatron.checkpoint.reader import tensor_key
from megatron.checkpoint.region import Region
from megatron.checkpoint.source import Source
from megatron.config import CheckpointConfig, PrecisionConfig, RunConfig, TokenizerConfig
from megatron.util.files import sync_path


def write_checkpoint(
    save: Path,
    source: Source,
    iteration: int | None = None,
    moments: bool = True,
    max_file_bytes: int = 5 * 10**9,
    progress: Callable[[str], None] = lambda line: None,
) -> Path:
    """Writes a checkpoint that any layout loads.

    Args:
        save: folder of checkpoints.
        source: what is written.
        iteration: the new checkpoint's iteration; None for the source's, or 0.
        moments: whether optimizer state is written too.
        max_file_bytes: no safetensors file is larger, unless one tensor is.
        progress: called with a line about each file.

    Returns:
        The new checkpoint's folder.

    Raises:
        CheckpointError: the source is damaged, no model can be made of it, or there are
            checkpoints in ``save``.
        OSError: a file cannot be written; nothing is left behind.
    """
    source.require_model()
    if save.is_dir() and (known := complete_tags(save)):
        raise CheckpointError(
            f"{save} holds {known[-1]}, which would no longer be the newest: name another folder"
        )
    if iteration is None:
        iteration = source.state.get("iteration", 0)
    with unfinished_folder(save / tag(iteration)) as folder:
        weights = _FileSeries(folder, "weights", max_file_bytes, progress)
        optimizer = _FileSeries(folder, "optimizer", max_file_bytes, progress)
        index = {}
        for name in source.names():
            kinds = [kind for kind in source.kinds(name) if moments or kind == "weight"]
            files = {
                kind: (weights if kind == "weight" else optimizer).add(
                    tensor_key(name, kind), source.tensor(name, kind)
                )
                for kind in kinds
            }
            index[name] = [Piece.of(Region.whole(source.shape(name)), files).to_json()]
        weights.close()
        optimizer.close()
        write_json(folder / "index.json", index)
        write_json(folder / "config.json", run_of(source, moments).to_dict())
        state = {key: value for key, value in source.state.items() if key != "world_size"}
        write_json(folder / "state.json", state | ({"iteration": iteration} if state else {}))
        source.copy_tokenizer(folder / "tokenizer")
        facts = {}
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            sync_path(path)
            facts[str(path.relative_to(folder))] = file_facts(path)
        return publish(save, iteration, facts)


def run_of(source: Source, moments: bool = True) -> RunConfig:
    """The configuration that a converted checkpoint is saved with: that of its run, as far as the
    source knows it."""
    run = source.run
    if run is None:
        # What it is stored in is what it will be exported in.
        dtype = source.dtype(source.names()[0])
        run = RunConfig(
            source.model,
            tokenizer=source.tokenizer or TokenizerConfig(),
            precision=PrecisionConfig(bf16=dtype == "bfloat16", fp16=dtype == "float16"),
        )
    checkpoint = dataclasses.replace(
        run.checkpoint, save_optim=run.checkpoint.save_optim and moments
    )
    if source.run is None:
        checkpoint = CheckpointConfig(save_optim=moments)
    run = dataclasses.replace(run, model=source.model, checkpoint=checkpoint)
    return run.with_vocabulary(source.model.vocabulary.size)


class _FileSeries:
    """Safetensors files of limited size, one behind the other."""

    def __init__(
        self, folder: Path, prefix: str, max_bytes: int, progress: Callable[[str], None]
    ) -> None:
        self.folder, self.prefix, self.max_bytes = folder, prefix, max_bytes
        self.progress = progress
        self.tensors: dict[str, Tensor] = {}
        self.bytes = self.number = 0

    def add(self, key: str, values: Tensor) -> str:
        """Takes a tensor; returns the name of the file that will hold it."""
        size = math.prod(values.shape) * values.itemsize
        if self.tensors and self.bytes + size > self.max_bytes:
            self.close()
            self.number += 1
        self.tensors[key] = values.contiguous()
        self.bytes += size
        return self._name()

    def close(self) -> None:
        """Writes what is collected."""
        if self.tensors:
            save_file(self.tensors, self.folder / self._name())
            self.progress(f"{self._name()}: {self.bytes / 1e6:,.1f} MB")
        self.tensors, self.bytes = {}, 0

    def _name(self) -> str:
        return f"{self.prefix}-{self.number:05d}.safetensors"
