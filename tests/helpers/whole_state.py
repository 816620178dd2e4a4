"""Whole weights, moments and buffers of a run, from what its ranks hold. Puts them together apart
from the code under test."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.engine.state import owned_slices
from megatron.engine.train_engine import TrainEngine
from megatron.parallel.shard import Shard, shard_of


class Share(NamedTuple):
    """The part of a tensor that a rank holds.

    Attributes:
        name, kind: canonical name, and ``weight`` or the name of a moment.
        shard: how the tensor is cut.
        place: the rank's coordinates.
        start: the first element of ``values`` in the rank's shard.
        values: flat.
    """

    name: str
    kind: str
    shard: Shard
    place: Mapping[str, int]
    start: int
    values: np.ndarray


def shares(engine: TrainEngine) -> list[Share]:
    """Return all that this rank holds."""
    place = engine.mesh.coordinates
    buffers = [
        Share(name, "weight", buffer.shard, place, 0, _array(buffer.values))
        for name, buffer in engine.buffers.items()
    ]
    return buffers + [
        Share(own.name, kind, shard_of(own.param), place, own.slice.start, _array(own.get(kind)))
        for own in owned_slices(engine)
        for kind in own.kinds
    ]


def _array(values: Tensor) -> np.ndarray:
    return values.detach().cpu().numpy().copy()


def whole(ranks: Iterable[Iterable[Share]]) -> dict[tuple[str, str], Tensor]:
    """Return whole tensors by (name, kind), from the shares of all ranks. Nothing is missing."""
    flats, result = {}, {}
    for name, kind, shard, place, start, values in (share for rank in ranks for share in rank):
        axes = {axis: place[axis] for axis in place if shard.over(axis) is not None}
        key = (name, kind, shard, tuple(axes.items()))
        if key not in flats:
            flats[key] = np.full(np.prod(shard.local_shape(axes)), np.nan, np.float32)
        flats[key][start : start + len(values)] = values
    for (name, kind, shard, axes), flat in flats.items():
        assert not np.isnan(flat).any(), (name, kind)
        if (name, kind) not in result:
            result[name, kind] = torch.full(shard.canonical_shape, torch.nan)
        local = torch.from_numpy(flat).view(shard.local_shape(dict(axes)))
        shard.place(result[name, kind], local, dict(axes))
    assert not any(values.isnan().any() for values in result.values())
    return result
