"""Loads checkpoints into the engine, whatever layout and program wrote them.

Each rank reads only its own shards, one parameter at a time, without a copy of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from megatron.checkpoint.files import CheckpointError, DamagedError
from megatron.checkpoint.manifest import KEPT_COUNTS
from megatron.checkpoint.reader import differences
from megatron.checkpoint.slices import Slice
from megatron.checkpoint.source import FoundCheckpoint, Source
from megatron.config.features import first_answer
from megatron.config.optimizer import STATES
from megatron.engine.state import (
    create_moments,
    holders,
    optimizer_step,
    owned_slices,
    set_loss_scaler_state,
    set_working_weights,
)
from megatron.engine.train_engine import ModelEngine, TrainEngine
from megatron.parallel.mesh import first_reason
from megatron.parallel.random import set_random_state
from megatron.parallel.shard import shard_of

T = TypeVar("T")


def load_checkpoint(
    engine: ModelEngine, found: FoundCheckpoint, weights_only: bool = False
) -> Source:
    """Load a checkpoint that was saved with any layout. Collective. With ``weights_only``, and for
    models that are not trained, optimizer, loss scaler and random state are not loaded. Parameters
    that a feature reports as new in this model keep their initial values. Raises DamagedError if a
    rank finds damage, and CheckpointError if the architecture differs.
    """
    options, world = engine.config.checkpoint, engine.mesh.world
    source = open_whole(engine, found)
    source.require_model()
    saved, wanted = source.model, engine.config.model
    if wanted.blocks_ahead:
        source.read_ahead()
        saved = source.model
    differing = differences(saved.with_head_of(wanted), wanted)
    tokens, rows = wanted.vocabulary.size, saved.vocabulary.size
    if len(differing) == 1 and tokens and rows and tokens > rows:
        raise CheckpointError(
            f"{found.folder} has a table of {rows} tokens, and the tokenizer of this run has "
            f"{tokens}: name the model's own tokenizer, or one without the added tokens; a table "
            "is extended in transformers, by resize_token_embeddings and save_pretrained"
        )
    if differing:
        raise CheckpointError(
            f"{found.folder} has a different architecture: {'; '.join(differing)} "
            "(--use-checkpoint-args uses the checkpoint's values for flags that are not given)"
        )
    fresh = first_answer(lambda f: f.fresh_parts(engine, source, weights_only)) or ()
    loaded: Source | None = None
    if isinstance(engine, TrainEngine):
        loaded = first_answer(lambda f: f.load(engine, source, fresh, not weights_only))
    if loaded is not None:
        source = loaded
    elif source.additions is not None and not weights_only:
        raise CheckpointError(
            f"{found.folder} was saved with --lora: it cannot be continued without; --finetune "
            "starts from its base with the adapters in the weights"
        )
    else:
        _undamaged(engine, lambda: load_weights(engine, source, fresh))
    # Later checkpoints record the architecture from which these weights were loaded.
    model = replace(engine.config.model, hf_architecture=source.model.hf_architecture)
    engine.config = replace(engine.config, model=model)
    if weights_only or not source.state or not isinstance(engine, TrainEngine):
        return source
    if options.load_optim:
        together(engine, lambda: check_optimizer(engine, source))
        _undamaged(engine, lambda: load_optimizer(engine, source))
        load_more = getattr(engine.optimizer, "load_more", None)
        if load_more is not None and optimizer_step(engine):
            optimizer = engine.config.optimizer.optimizer
            together(engine, lambda: load_more(found.folder, optimizer))
        together(engine, lambda: _load_kernel_state(engine, found.folder))
    path = found.folder / f"random-{world.rank:05d}.safetensors"
    if options.load_rng and source.state.get("world_size") == world.size and path.is_file():
        together(engine, lambda: _load_random_state(path))
    return source


def open_whole(engine: ModelEngine, found: FoundCheckpoint) -> Source:
    """Open a checkpoint after verifying the checksums of its files, which are divided among all
    ranks. Collective. Raises DamagedError on every rank if one finds the checkpoint damaged."""
    world = engine.mesh.world
    _undamaged(engine, lambda: found.verify(world.rank, world.size))
    return _undamaged(engine, lambda: found.open(verify=False))


def _undamaged(engine: ModelEngine, step: Callable[[], T]) -> T:
    """Run ``step`` as :func:`together` does, but raise every error as DamagedError."""
    try:
        return together(engine, step)
    except Exception as error:  # any error: all ranks must take the same path
        raise DamagedError(str(error) or repr(error)) from error


def _load_kernel_state(engine: TrainEngine, folder: Path) -> None:
    """Load the saved state of linear kernels. Print a note if the checkpoint lacks it."""
    if engine.kernels.file is None:
        return
    state: dict[str, Tensor] = {}
    for path in sorted(folder.glob(f"{engine.kernels.file}-*.safetensors")):
        try:
            state |= load_file(path)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: {error}; --no-load-optim skips it") from None
    line = engine.kernels.load(state, folder)
    if line is not None and engine.mesh.world.rank == 0:
        print(line, flush=True)


def _load_random_state(path: Path) -> None:
    try:
        set_random_state(load_file(path))
    except SafetensorError as error:
        raise CheckpointError(f"{path}: {error}; --no-load-rng skips it") from None


def together(engine: ModelEngine, step: Callable[[], T]) -> T:
    """Run ``step`` on this rank. If it fails on any rank, raise an error on all ranks, so that no
    rank waits for a failed one: this rank's own error, or CheckpointError with another rank's
    reason. Not collective for a model on one process, even within a run of several processes."""
    result, error = None, None
    try:
        result = step()
    except Exception as caught:
        error = caught
    reason = None if error is None else str(error) or repr(error)
    if engine.mesh.world.size > 1:
        reason = first_reason(reason, engine.device)
    if error is not None:
        raise error
    if reason is not None:
        raise CheckpointError(reason)
    return result  # type: ignore[return-value]


@torch.no_grad()
def load_weights(engine: ModelEngine, source: Source, fresh: Collection[str] = ()) -> None:
    """Load this rank's shards of the float32 weights, and the weights that the model computes with.
    Parameters named in ``fresh`` keep their initial values."""
    slices = owned_slices(engine) if isinstance(engine, TrainEngine) else ()
    owned = {own.param: own for own in slices}
    kept = {param for param, name in engine.names.items() if name in fresh}

    def values(param: nn.Parameter, start: int, end: int) -> Tensor:
        wanted = Slice.of(shard_of(param), engine.mesh.coordinates, start, end)
        flat = _read(source, engine.names[param], "weight", wanted, end - start)
        own = owned.get(param)
        if own is not None:
            first = own.slice.start - start
            own.set("weight", flat[first : first + own.count])
        return flat

    set_working_weights(engine, values, but=kept)
    stored = set(source.names()) if engine.quantised or engine.buffers else ()
    for name, weight in engine.quantised:
        if name in stored and name not in fresh:
            weight.fill(source.tensor(name), engine.device)
    for name, buffer in engine.buffers.items():
        if name in stored and name not in fresh:
            buffer.values.copy_(source.tensor(name))
    if not isinstance(engine, TrainEngine):
        for param in kept:
            engine.backend.initialise(engine.names[param], param)
    engine.kernels.invalidate()


@torch.no_grad()
def load_optimizer(engine: TrainEngine, source: Source) -> None:
    """Load the optimizer's moments, the engine's kept states and the loss scaler."""
    set_loss_scaler_state(engine, source.state.get("loss_scaler", {}))
    for kind, kept in engine.kept.items():
        kept.restart(holders(engine), source.state.get(KEPT_COUNTS, {}).get(kind, 0))
    for own in owned_slices(engine) if engine.kept else ():
        for kind in own.kept:
            own.set(kind, _read(source, own.name, kind, own.slice, own.count))
    # States are per element or per matrix. None exist before the first update or for plain SGD.
    by_matrix = hasattr(engine.optimizer, "load_more") and source.state["optimizer_step"]
    if not by_matrix and stored_kinds(source).isdisjoint(STATES[engine.config.optimizer.optimizer]):
        if any(engine.optimizer.state.get(holder) for holder in holders(engine)):
            create_moments(engine, source.state["optimizer_step"])  # a rollback resets its states
        return
    create_moments(engine, source.state["optimizer_step"])
    for own in owned_slices(engine):
        for kind in own.moments:
            own.set(kind, _read(source, own.name, kind, own.slice, own.count))


def stored_kinds(source: Source) -> set[str]:
    """Return the names of a checkpoint's states over all parameters: ``weight`` and moments."""
    return {kind for parameter in source.names() for kind in source.kinds(parameter)}


def check_optimizer(engine: TrainEngine, source: Source) -> None:
    """Raise CheckpointError if a checkpoint has no state for this run's optimizer."""
    name, run, stored = engine.config.optimizer.optimizer, source.run, stored_kinds(source)
    other = None if run is None else run.optimizer.optimizer
    if other not in (None, name):
        raise CheckpointError(
            f"{source.folder} was saved by --optimizer {other}, and this run has --optimizer {name}"
            f", which cannot use its {', '.join(sorted(stored - {'weight'})) or 'states'}: "
            "--no-load-optim continues with the weights and new states of zeros, at its iteration; "
            f"--optimizer {other} continues with them"
        )
    fits = stored.issuperset(STATES[name]) if run is None else run.checkpoint.save_optim
    if not fits:
        raise CheckpointError(
            f"{source.folder} has no {', '.join(STATES[name])}: it was saved with "
            "--no-save-optim or by another optimizer; --no-load-optim starts with a new state"
        )


def _read(source: Source, name: str, kind: str, wanted: Slice, numel: int) -> Tensor:
    if wanted.numel == numel:
        return source.read(name, kind, wanted)
    values = torch.zeros(numel)
    if wanted.numel:
        values[: wanted.numel] = source.read(name, kind, wanted)
    return values
