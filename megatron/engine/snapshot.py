"""What one rank writes of a checkpoint: views of the engine's state, or copies that training leaves
alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.index import piece_of
from megatron.checkpoint.reader import tensor_key
from megatron.engine.gradient_norm import owned
from megatron.engine.state import fragments
from megatron.engine.train_engine import TrainEngine
from megatron.parallel.mesh import AXES, MODEL
from megatron.parallel.random import random_state


@dataclass(frozen=True)
class Part:
    """One rank's part of a checkpoint.

    Attributes:
        tensors: by file name and key, float32 (random state: uint8).
        pieces: the index's entries for them, by canonical name.
    """

    tensors: dict[str, dict[str, Tensor]]
    pieces: dict[str, list[dict[str, Any]]]


def own_part(engine: TrainEngine) -> Part:
    """This rank's part, as views of the engine's state where that is float32.

    At stage 0 all replicas hold the same; the first one writes. At others each has a part.
    """
    options, rank = engine.config.checkpoint, engine.mesh.world.rank
    weights_file = f"weights-{rank:05d}.safetensors"
    optimizer_file = f"optimizer-{rank:05d}.safetensors"
    weights: dict[str, Tensor] = {}
    moments: dict[str, Tensor] = {}
    pieces: dict[str, list[dict[str, Any]]] = {}
    among = AXES if engine.stage == 0 else MODEL
    for part in fragments(engine):
        if not owned(part.param, engine.mesh, among):
            continue
        files = {"weight": weights_file}
        if options.save_optim:
            files |= dict.fromkeys(part.moments, optimizer_file)
        end = part.start + part.weight.numel()
        piece = piece_of(part.shard, engine.mesh.coordinates, part.start, end, files)
        if piece is None:
            continue
        shape = piece.share_shape if piece.is_whole_share else (piece.numel,)
        for kind in files:
            values = part.weight if kind == "weight" else part.moments[kind]
            target = weights if kind == "weight" else moments
            values = values[: piece.numel].detach().to(torch.float32)
            target[tensor_key(part.name, kind, piece.part)] = values.view(shape)
        pieces.setdefault(part.name, []).append(piece.to_json())
    tensors = {
        weights_file: weights,
        optimizer_file: moments,
        f"random-{rank:05d}.safetensors": random_state() if options.save_rng else {},
    }
    return Part({name: found for name, found in tensors.items() if found}, pieces)


class HostBuffers:
    """Host memory for a rank's part, kept from one save to the next: the first copy of a size pays
    for its pages, later ones do not. For GPUs it is pinned."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def copy(self, part: Part) -> Part:
        """Copies a part; when this returns, the engine's state may change.

        The copies of all GPU tensors are queued one behind the other and waited for once.
        """
        copied: dict[str, dict[str, Tensor]] = {}
        for file, tensors in part.tensors.items():
            copied[file] = {}
            for key, values in tensors.items():
                buffer = self._buffer((file, key), values)
                buffer.copy_(values, non_blocking=True)
                copied[file][key] = buffer
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return Part(copied, part.pieces)

    def _buffer(self, place: tuple[str, str], values: Tensor) -> Tensor:
        buffer = self._buffers.get(place)
        if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
            pinned = self._device.type == "cuda"
            buffer = torch.empty(values.shape, dtype=values.dtype, pin_memory=pinned)
            self._buffers[place] = buffer
        return buffer
