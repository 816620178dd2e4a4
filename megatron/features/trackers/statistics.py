"""Numbers over all trained parameters of a model: norms of weights and optimizer states, and zeros
in gradients. Every element counts once, whatever the layout: tensors that tensor-parallel ranks,
pipeline stages or data-parallel ranks have in common are counted on one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.engine.state import OwnedSlice, owned_gradients, owned_slices
from megatron.engine.train_engine import TrainEngine
from megatron.engine.update.optimizer import owned
from megatron.parallel.mesh import AXES, MODEL

KINDS = ("variance", "variance_sqrt", "momentum", "weight")
"""Kinds of tensors that have norms; see :func:`state_norms`."""

MEASURES = ("l2", "l1", "abs_max")
"""Root of the sum of squares, sum of absolute values, largest absolute value."""

_NAMES = {"exp_avg": "momentum", "momentum_buffer": "momentum", "exp_avg_sq": "variance"}
"""From torch.optim's names of states."""

_MOST_ON_CPU, _MOST_ON_DEVICE = 2**15, 2**24
"""Numbers of elements that are copied to float64 at once: on a CPU the copy stays in its cache."""


@torch.no_grad()
def state_norms(engine: TrainEngine, kinds: Sequence[str] = KINDS) -> dict[str, Tensor]:
    """``KIND_MEASURE`` for each of ``kinds``: the weights in float32, the first moment (of Adam, or
    the buffer of SGD), Adam's second moment and its root. Float64 scalars on the device; 0 of
    states that do not exist. Every rank must call it; it does not wait for the device."""
    totals = torch.zeros(len(kinds), 3, dtype=torch.float64, device=engine.device)
    for piece in owned_slices(engine):
        if not _counts(engine, piece):
            continue
        for state in piece.kinds:
            kind = _NAMES.get(state, state)
            if piece.slice.numel and {kind, f"{kind}_sqrt"}.intersection(kinds):
                for name, numbers in _measured(kind, piece.get(state)[: piece.slice.numel]):
                    if name in kinds:
                        row, more = totals[kinds.index(name)], numbers.to(totals.device)
                        row[:2] += more[:2]
                        torch.maximum(row[2], more[2], out=row[2])
    sums, maxima = totals[:, :2].contiguous(), totals[:, 2].contiguous()
    world = engine.mesh.world
    if world.size > 1:
        dist.all_reduce(sums, group=world.handle)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=world.handle)
    norms = torch.stack([sums[:, 0].sqrt(), sums[:, 1], maxima], dim=1)
    names = [f"{kind}_{measure}" for kind in kinds for measure in MEASURES]
    return dict(zip(names, norms.view(-1), strict=True))


@torch.no_grad()
def zeros_in_gradients(engine: TrainEngine) -> Tensor:
    """Number of elements of the gradients, averaged over the replicas, that are zero; a float64
    scalar on the device. Every rank must call it, between the backward pass and the update. Rows
    that pad the vocabulary do not count."""
    zeros = torch.zeros((), dtype=torch.float64, device=engine.device)
    for piece, grad in owned_gradients(engine):
        if _counts(engine, piece):
            zeros += (grad.numel() - grad.count_nonzero()).to(zeros.device)
    if engine.mesh.world.size > 1:
        dist.all_reduce(zeros, group=engine.mesh.world.handle)
    return zeros


def _counts(engine: TrainEngine, piece: OwnedSlice) -> bool:
    """True if no other rank counts this slice. From stage 1 on replicas have different parts."""
    return owned(piece.param, engine.mesh, MODEL if engine.stage else AXES)


def _measured(kind: str, values: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Sum of squares, sum of absolute values and largest of them, float64 [3], of each part; of a
    variance's root too."""
    for part in values.split(_MOST_ON_CPU if values.device.type == "cpu" else _MOST_ON_DEVICE):
        wide = part.double()
        squares, absolute = torch.dot(wide, wide), wide.abs_()
        total, largest = absolute.sum(), absolute.max()
        yield kind, torch.stack([squares, total, largest])
        if kind == "variance":
            yield "variance_sqrt", torch.stack([total, absolute.sqrt_().sum(), largest.sqrt()])
