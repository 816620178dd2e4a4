"""Initialise the parameters that a checkpoint lacks because its model has a different head or other
different parts. The checkpoint source's notes report them."""

from __future__ import annotations

import torch

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import Source
from megatron.config.features import AHEAD
from megatron.engine.loading import together
from megatron.engine.train_engine import ModelEngine, TrainEngine
from megatron.model.layer_list import LayerStack
from megatron.parallel.tensor_parallel import TensorParallel


def fresh_parts(engine: ModelEngine, source: Source, weights_only: bool) -> tuple[str, ...] | None:
    """Return the canonical names of the parameters that the model of ``source`` lacks, or None if
    both models have the same parts. Raises CheckpointError if they differ in anything else, or if
    training cannot be resumed with other parts."""
    saved, wanted = source.model, engine.config.model
    other_head = (saved.head, saved.num_labels) != (wanted.head, wanted.num_labels)
    if other_head and not weights_only:
        raise CheckpointError(
            f"{source.folder} contains a model with {saved.head_shown}, and this run needs "
            f"{wanted.head_shown}: it cannot be continued; --finetune starts from its weights and "
            "leaves its head out"
        )
    if other_head:
        return together(engine, lambda: _fresh_head(engine, source))
    if saved.family != wanted.family:
        return together(engine, lambda: _added_parts(engine, source))
    if saved.blocks_ahead or wanted.blocks_ahead:
        return together(engine, lambda: _other_ahead(engine, source, not weights_only))
    return None


def _fresh_head(engine: ModelEngine, source: Source) -> tuple[str, ...]:
    """Return the parameters of the model's head that a checkpoint with another head lacks, or has
    with another shape, and add a note. Raises CheckpointError if other parameters differ."""
    model, parts, stored = engine.config.model, engine.spec.head_parts, set(source.names())
    shapes = _whole_shapes(engine)
    fits = {name for name in stored & shapes.keys() if source.shape(name) == shapes[name]}
    fresh = tuple(name for name in shapes if name not in fits)
    left_out = sorted(stored - fits)
    wrong = [name for name in (*fresh, *left_out) if not name.startswith(parts)]
    if wrong:
        raise CheckpointError(
            f"{source.folder} and a model with {model.head_shown} differ in more than their heads: "
            f"{', '.join(wrong[:5])}"
        )
    source.notes = (
        *source.notes,
        f"the model of {source.folder} has {source.model.head_shown}: "
        f"initialised {', '.join(fresh) or 'nothing'}; left out {', '.join(left_out) or 'nothing'}",
    )
    return fresh


def _added_parts(engine: ModelEngine, source: Source) -> tuple[str, ...]:
    """Return the parameters that this run's family adds to a checkpoint of its base family, and add
    a note. Raises CheckpointError if the models differ in anything else."""
    shapes, stored = _whole_shapes(engine), set(source.names())
    fresh = tuple(name for name in shapes if name not in stored)
    wrong = [name for name in fresh if engine.spec.added_parts.isdisjoint(name.split("."))]
    wrong += sorted(stored - shapes.keys())
    model = engine.config.model
    if wrong:
        raise CheckpointError(
            f"{source.folder} contains a model of the family {source.model.family}, which differs "
            f"from this run's {model.family} in more than what that adds: {', '.join(wrong[:5])}"
        )
    layers = dict.fromkeys(".".join(name.split(".")[:2]) for name in fresh)
    source.notes = (
        *source.notes,
        f"a model of the family {source.model.family}: initialised what {model.family} adds in "
        f"{', '.join(layers)}",
    )
    return fresh


def _other_ahead(engine: ModelEngine, source: Source, continues: bool) -> tuple[str, ...]:
    """Return the parameters of MTP blocks that a checkpoint lacks, and add a note about these and
    unused ones. Raises CheckpointError if resumed training would need others."""
    shapes, stored = _whole_shapes(engine), set(source.names())
    fresh = tuple(name for name in shapes if name not in stored)
    fresh = tuple(name for name in fresh if name.startswith(AHEAD))
    left_out = [name for name in stored - shapes.keys() if name.startswith(AHEAD)]
    changes = [
        f"{what} {', '.join(sorted({'.'.join(name.split('.')[:2]) for name in names}))}"
        for what, names in (("initialised", fresh), ("left out", left_out))
        if names
    ]
    if changes and continues and isinstance(engine, TrainEngine):
        raise CheckpointError(
            f"{source.folder} and this run differ in the blocks that predict further tokens "
            f"({'; '.join(changes)}): it cannot be continued; give the --mtp-num-layers "
            f"{source.model.blocks_ahead} of the checkpoint, or --finetune, which starts from its "
            "weights"
        )
    if changes:
        note = f"multi-token prediction of {source.folder}: {'; '.join(changes)}"
        source.notes = (*source.notes, note)
    return fresh


def _whole_shapes(engine: ModelEngine) -> dict[str, tuple[int, ...]]:
    """Return the canonical shapes of the model's parameters except the run's own additions, which
    the feature that loads the base handles."""
    with torch.device("meta"):
        whole = LayerStack(engine.spec.layers(TensorParallel()), engine.config.parallel)
    shapes = whole.canonical_shapes().items()
    return {name: shape for name, shape in shapes if not engine.spec.is_addition(name)}
