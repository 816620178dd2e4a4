"""What one rank writes of a checkpoint: views of the engine's state, or copies that training leaves
alone."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.writer import SliceWriter
from megatron.engine.gradient_norm import owned
from megatron.engine.state import owned_slices
from megatron.engine.train_engine import TrainEngine
from megatron.parallel.mesh import AXES, MODEL
from megatron.parallel.random import random_state
from megatron.parallel.shard import shard_of


def own_slices(engine: TrainEngine, folder: Path) -> SliceWriter:
    """What this rank writes into a checkpoint's folder, as views of the engine's state where that
    is float32.

    At stage 0 all replicas hold the same; the first one writes. At others each has its own.
    """
    options = engine.config.checkpoint
    writer = SliceWriter(folder, engine.mesh.world.rank)
    among = AXES if engine.stage == 0 else MODEL
    for own in owned_slices(engine):
        numel = own.slice.numel
        if numel and owned(own.param, engine.mesh, among):
            tensors = {"weight": own.weight} | (own.moments if options.save_optim else {})
            stored = {
                kind: values[:numel].detach().to(torch.float32) for kind, values in tensors.items()
            }
            writer.add(own.name, own.slice, stored.items(), shard_of(own.param).part)
    if options.save_rng:
        for key, values in random_state().items():
            writer.put("random", key, values)
    return writer


class HostBuffers:
    """Host memory for a rank's tensors, kept from one save to the next: the first copy of a size
    pays for its pages, later ones do not. For GPUs it is pinned."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def copy(self, files: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Copies tensors by file and key; when this returns, the engine's state may change.

        The copies of all GPU tensors are queued one after the other and waited for once.
        """
        copied = {
            file: {key: self._copy((file, key), values) for key, values in tensors.items()}
            for file, tensors in files.items()
        }
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return copied

    def _copy(self, place: tuple[str, str], values: Tensor) -> Tensor:
        buffer = self._buffers.get(place)
        if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
            pinned = self._device.type == "cuda"
            buffer = torch.empty(values.shape, dtype=values.dtype, pin_memory=pinned)
            self._buffers[place] = buffer
        return buffer.copy_(values, non_blocking=True)
