"""Loads a checkpoint into the engine, whatever layout and program wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.folder import verify
from megatron.checkpoint.reader import CheckpointReader, differences
from megatron.config import RunConfig
from megatron.engine.agreement import any_rank
from megatron.engine.random_state import set_random_state
from megatron.engine.state import (
    MOMENTS,
    Fragment,
    create_moments,
    fragments,
    set_loss_scaler_state,
    set_working_weights,
)
from megatron.engine.train_engine import TrainEngine
from megatron.parallel.shard import shard_of


def load_checkpoint(engine: TrainEngine, folder: Path) -> tuple[RunConfig, dict[str, Any]]:
    """Loads a checkpoint written at any layout; every rank must call it.

    Returns:
        The configuration and the state (see ``state.json``) that were saved with it.

    Raises:
        CheckpointError: the checkpoint is damaged or of another architecture.
    """
    options, world = engine.config.checkpoint, engine.groups.world
    damage: CheckpointError | OSError | None = None
    try:
        verify(folder, world.rank, world.size)
        reader = CheckpointReader(folder)
    except (CheckpointError, OSError) as error:
        damage = error
    if any_rank(damage is not None, engine.device):
        raise damage or CheckpointError(f"{folder} is damaged: another rank says which file")
    differing = differences(reader.config, engine.config)
    if differing:
        raise CheckpointError(f"{folder} holds another architecture: {'; '.join(differing)}")
    load_weights(engine, reader)
    if options.finetune:
        return reader.config, reader.state
    if options.load_optim:
        load_optimizer(engine, reader)
    path = folder / f"random-{world.rank:05d}.safetensors"
    if options.load_rng and reader.state["world_size"] == world.size and path.is_file():
        set_random_state(load_file(path))
    return reader.config, reader.state


@torch.no_grad()
def load_weights(engine: TrainEngine, reader: CheckpointReader) -> None:
    """Fills the float32 weights that this rank owns, and the model's working weights."""
    tensor = engine.groups.tensor
    held = {part.param: part for part in fragments(engine)}

    def share(param: nn.Parameter) -> Tensor:
        whole = reader.tensor(engine.names[param])
        values = shard_of(param).cut(whole, tensor.rank, tensor.size)
        if param in held:
            _fill(held[param].weight, held[param], values)
        return values

    set_working_weights(engine, share)


@torch.no_grad()
def load_optimizer(engine: TrainEngine, reader: CheckpointReader) -> None:
    """Fills the optimizer's moments and the loss scaler.

    Raises:
        CheckpointError: the checkpoint has no optimizer state, or that of another optimizer.
    """
    saved, name = reader.config, engine.config.optimizer.optimizer
    if not saved.checkpoint.save_optim or saved.optimizer.optimizer != name:
        raise CheckpointError(
            f"{reader.folder} has no {', '.join(MOMENTS[name])}: it was saved with "
            "--no-save-optim or by another optimizer; --no-load-optim starts anew"
        )
    set_loss_scaler_state(engine, reader.state["loss_scaler"])
    if all(reader.kinds(parameter) == ["weight"] for parameter in reader.pieces):
        return  # saved before the first update, or by SGD without momentum
    create_moments(engine, reader.state["optimizer_step"])
    tensor = engine.groups.tensor
    for part in fragments(engine):
        for kind, values in part.moments.items():
            whole = reader.tensor(part.name, kind)
            _fill(values, part, part.shard.cut(whole, tensor.rank, tensor.size))


def _fill(target: Tensor, part: Fragment, share: Tensor) -> None:
    target.copy_(share.reshape(-1)[part.start : part.start + target.numel()])
