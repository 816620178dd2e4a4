"""Saves the engine's state in the project's own format."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron.checkpoint.files import CheckpointError, sync_file, write_json
from megatron.checkpoint.folder import (
    file_facts,
    incomplete_folder,
    publish,
    remove_incomplete,
)
from megatron.checkpoint.index import piece_of
from megatron.checkpoint.reader import tensor_key
from megatron.engine.agreement import any_rank
from megatron.engine.deepspeed_json import Json
from megatron.engine.random_state import random_state
from megatron.engine.state import fragments, loss_scaler_state, optimizer_step
from megatron.engine.train_engine import TrainEngine

_PIECES = "pieces-{rank:05d}.json"


@dataclass(frozen=True)
class CheckpointWriter:
    """Writes checkpoints of one run.

    Attributes:
        engine: whose state is saved.
        content: the completed DeepSpeed JSON.
        save_tokenizer: writes the tokenizer's files into a folder.
    """

    engine: TrainEngine
    content: Json
    save_tokenizer: Callable[[Path], None]

    def save(self, iteration: int, counters: dict[str, Any]) -> Path:
        """Saves a checkpoint; every rank must call it.

        It becomes visible only when every rank has written its part. On an error on any rank the
        part-written folder is removed, and earlier checkpoints stay as they are.

        Args:
            iteration: number of steps taken.
            counters: what the training loop needs to go on.

        Raises:
            CheckpointError: a rank could not write.
        """
        save = Path(self.engine.config.checkpoint.save or "")
        folder = incomplete_folder(save, iteration)
        main = self.engine.groups.world.rank == 0

        def prepare() -> None:
            if main:
                save.mkdir(parents=True, exist_ok=True)
                remove_incomplete(save)
                folder.mkdir()

        def finish() -> None:
            if main:
                self._finish(save, folder, iteration, counters)

        try:
            for step in (prepare, lambda: self._write_own_part(folder), finish):
                self._together(step, folder)
        except CheckpointError:
            if main:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    def _together(self, step: Callable[[], None], folder: Path) -> None:
        """Runs ``step`` on this rank and raises on all ranks if it failed on one."""
        error: Exception | None = None
        try:
            step()
        except Exception as caught:  # whatever it is, the other ranks must not wait for this one
            error = caught
        if any_rank(error is not None, self.engine.device):
            reason = f": {error}" if error is not None else " on another rank"
            raise CheckpointError(
                f"saving to {folder.parent} failed{reason}; earlier checkpoints are untouched"
            ) from error

    def _write_own_part(self, folder: Path) -> None:
        engine, rank = self.engine, self.engine.groups.world.rank
        options = engine.config.checkpoint
        tensor = engine.groups.tensor
        weights: dict[str, Tensor] = {}
        moments: dict[str, Tensor] = {}
        pieces: dict[str, list[Any]] = {}
        for part in fragments(engine) if self._owns_state() else ():
            if not engine.owns(part.param):
                continue
            files = {"weight": f"weights-{rank:05d}.safetensors"}
            if options.save_optim:
                files |= {kind: f"optimizer-{rank:05d}.safetensors" for kind in part.moments}
            piece = piece_of(
                part.shard, tensor.rank, tensor.size, part.start,
                part.start + part.weight.numel(), files,
            )  # fmt: skip
            if piece is None:
                continue
            count = piece.end - piece.start
            shape = piece.share_shape if piece.is_whole_share else (count,)
            for kind in files:
                values = part.weight if kind == "weight" else part.moments[kind]
                target = weights if kind == "weight" else moments
                values = values[:count].detach().to("cpu", torch.float32).contiguous()
                target[tensor_key(part.name, kind, piece.part)] = values.view(shape)
            pieces.setdefault(part.name, []).append(piece.to_json())
        written = {
            f"weights-{rank:05d}.safetensors": weights,
            f"optimizer-{rank:05d}.safetensors": moments,
            f"random-{rank:05d}.safetensors": random_state() if options.save_rng else {},
        }
        facts = {}
        for name, tensors in written.items():
            if tensors:
                save_file(tensors, folder / name)
                sync_file(folder / name)
                facts[name] = file_facts(folder / name)
        write_json(folder / _PIECES.format(rank=rank), {"pieces": pieces, "files": facts})

    def _owns_state(self) -> bool:
        """At stage 0 all data-parallel ranks hold the same; the first one writes."""
        return self.engine.stage > 0 or self.engine.data_rank == 0

    def _finish(self, save: Path, folder: Path, iteration: int, counters: dict[str, Any]) -> None:
        engine = self.engine
        index: dict[str, list[Any]] = {}
        facts: dict[str, Any] = {}
        for rank in range(engine.groups.world.size):
            path = folder / _PIECES.format(rank=rank)
            part = json.loads(path.read_text())
            for name, found in part["pieces"].items():
                index.setdefault(name, []).extend(found)
            facts |= part["files"]
            path.unlink()
        write_json(folder / "index.json", index)
        write_json(folder / "config.json", engine.config.to_dict())
        write_json(folder / "deepspeed.json", self.content)
        state = {
            "iteration": iteration,
            **counters,
            "optimizer_step": optimizer_step(engine),
            "loss_scaler": loss_scaler_state(engine),
            "world_size": engine.groups.world.size,
        }
        write_json(folder / "state.json", state)
        self.save_tokenizer(folder / "tokenizer")
        for path in sorted(folder.rglob("*")):
            name = str(path.relative_to(folder))
            if path.is_file() and name not in facts:
                sync_file(path)
                facts[name] = file_facts(path)
        publish(save, iteration, facts)


def check_writable(save: str) -> None:
    """Finds out before training whether checkpoints can be written.

    Raises:
        CheckpointError: ``--save`` cannot be made or written to.
    """
    try:
        Path(save).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=save) as probe:
            probe.write(b"probe")
    except OSError as error:
        raise CheckpointError(
            f"--save {save}: cannot write there ({error.strerror}); name a folder that you can "
            "write to"
        ) from None
