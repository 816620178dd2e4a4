"""Muon (Jordan et al. 2024): momentum, of which each matrix is orthogonalised as a whole.

A rank has a part of a matrix: its share of a tensor-parallel layer, and of that what ZeRO leaves to
it. The parts come together on one of the ranks that have them (:mod:`matrices`), which computes the
update of the whole matrix. So the result does not depend on the layout.

Shapes: M rows, N columns of a matrix; E experts of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from megatron.features.optimizers.matrices import Deal, OwnedPart
from megatron.features.optimizers.newton_schulz import orthogonalise, scale
from megatron.features.optimizers.rules import Group, UpdateRule
from megatron.parallel.mesh import Group as Ranks
from megatron.parallel.mesh import Mesh
from megatron.parallel.shard import shard_of

Place = tuple[int, Tensor, int, int]
"""Start of a rank's part in its share of a parameter, the tensor that the optimizer updates, the
part's start in that, and its length (nothing below 1)."""

Rows = slice | Tensor
"""Rows of one of the matrices that are fused in a parameter: a range, or their numbers."""


def in_order(lengths: Sequence[int]) -> list[slice]:
    """Ranges of so many rows each, one after another."""
    return [slice(end - each, end) for each, end in zip(lengths, accumulate(lengths), strict=True)]


@dataclass(frozen=True)
class MuonSettings:
    """Values of the flags.

    Attributes:
        coefficients: of each Newton-Schulz step.
        product_dtype: of the products of float32 matrices.
        rows: of the matrices that are fused in a parameter, each row in one of them.
    """

    momentum: float
    nesterov: bool
    coefficients: list[tuple[float, float, float]]
    scale_mode: str
    factor: float
    product_dtype: torch.dtype
    rows: Callable[[nn.Parameter], Sequence[Rows]]

    def update(self, param: nn.Parameter, direction: Tensor) -> Tensor:
        """The update of a whole parameter, [M, N] or [E, M, N], from its direction: matrices that
        are fused along M are orthogonalised one by one."""
        dtype = self.product_dtype if direction.dtype == torch.float32 else direction.dtype
        updates = torch.empty_like(direction)
        for rows in self.rows(param):
            matrix = direction[..., rows, :]
            factor = scale(self.scale_mode, *matrix.shape[-2:]) * self.factor
            updates[..., rows, :] = orthogonalise(matrix, self.coefficients, dtype) * factor
        return updates


class Muon(UpdateRule):
    """Muon over parts of matrices.

    Attributes:
        place_of: finds this rank's part of a parameter, once the engine exists.
    """

    states = ("momentum_buffer",)
    place_of: Callable[[nn.Parameter], Place]

    def __init__(
        self, settings: MuonSettings, matrices: Sequence[nn.Parameter], mesh: Mesh
    ) -> None:
        self._settings, self._matrices, self._mesh = settings, matrices, mesh
        self._parts: dict[Tensor, list[OwnedPart]] = {}
        self._deals: dict[tuple[Tensor, ...], list[Deal]] = {}

    def update(self, tensors: Sequence[Tensor], states: Sequence[Group], group: Group) -> None:
        rate, decay = group["lr"], group["weight_decay"]
        momentum, nesterov = self._settings.momentum, self._settings.nesterov
        directions = []
        for tensor, state in zip(tensors, states, strict=True):
            grad, mean = tensor.grad, state["momentum_buffer"]
            assert grad is not None
            mean.lerp_(grad, 1 - momentum)
            directions.append(torch.lerp(grad, mean, momentum) if nesterov else mean.clone())
        self._orthogonalise(tuple(tensors), directions)
        for tensor, direction in zip(tensors, directions, strict=True):
            tensor.mul_(1 - rate * decay).sub_(direction, alpha=rate)

    def _orthogonalise(self, tensors: tuple[Tensor, ...], directions: Sequence[Tensor]) -> None:
        """Replace the directions, each of a tensor, by updates of whole matrices."""
        if tensors not in self._deals:
            self._deals[tensors] = list(self._dealt(tensors))
        flat = {tensor: each.view(-1) for tensor, each in zip(tensors, directions, strict=True)}
        for deal in self._deals[tensors]:
            pieces = [flat[p.holder].narrow(0, p.offset, p.length) for p in deal.parts]
            updates = deal.updates(pieces, self._settings.update)
            for piece, update in zip(pieces, updates, strict=True):
                piece.copy_(update)

    def _dealt(self, tensors: Sequence[Tensor]) -> Iterator[Deal]:
        """The matrices of these tensors, by the ranks that share them; all ranks must call it."""
        if not self._parts:
            for param in self._matrices:
                _, holder, offset, length = self.place_of(param)
                start, count = (offset, length) if length > 0 else (0, 0)
                part = OwnedPart(param, holder, start, count)
                self._parts.setdefault(holder, []).append(part)
        by_ranks: dict[Ranks, list[OwnedPart]] = {}
        for part in (part for tensor in tensors for part in self._parts.get(tensor, ())):
            by_ranks.setdefault(self._mesh.replicas(shard_of(part.param)), []).append(part)
        for replicas, parts in by_ranks.items():
            yield Deal(parts, replicas, self._mesh)
