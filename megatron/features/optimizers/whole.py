"""Rules that update whole matrices.

A rank has a piece of a matrix: its ZeRO partition of its shard of a tensor-parallel layer. The
pieces are gathered on one of the ranks that have them (:mod:`matrices`). That rank keeps the states
of the whole matrix and computes its update. The result therefore does not depend on the layout.

Shapes: M rows, N columns of a matrix; E experts of a rank.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.features.optimizers.matrices import Deal, OwnedPart, expert_numbers, over_tensor
from megatron.features.optimizers.rules import Group, UpdateRule, descend, joined
from megatron.parallel.mesh import Group as Ranks
from megatron.parallel.mesh import Mesh
from megatron.parallel.shard import shard_of

Rows = slice | Tensor
"""Rows of one of the matrices fused in a parameter: a range, or a tensor of indices."""


def in_order(lengths: Sequence[int]) -> list[slice]:
    """Return consecutive ranges of rows of the given lengths."""
    return [slice(end - each, end) for each, end in zip(lengths, accumulate(lengths), strict=True)]


class Matrix(NamedTuple):
    """Whole matrix, or one per expert, with its states.

    Attributes:
        values: tensor [M, N] or [E, M, N] from which the update is computed.
        number: number of updates so far, including this one.
    """

    values: Tensor
    states: dict[str, Tensor]
    number: float


class WholeRule(UpdateRule):
    """Rule that updates whole matrices. ``states`` names the elementwise states; all other states
    belong to whole matrices.

    Args:
        settings: settings of the rule.
        matrices: names of the parameters.
        rows: function that returns the rows of each matrix fused in a parameter. Together they
            cover all rows.
    """

    def __init__(
        self,
        settings: Any,
        matrices: Mapping[nn.Parameter, str],
        rows: Callable[[nn.Parameter], Sequence[Rows]],
        mesh: Mesh,
    ) -> None:
        self._settings = settings
        self._matrices, self._mesh = matrices, mesh
        self._rows = {param: _present(param, rows(param)) for param in matrices}
        self._parts: dict[Tensor, list[OwnedPart]] = {}
        self._deals: dict[tuple[Tensor, ...], list[Deal]] = {}
        self._states: dict[tuple[nn.Parameter, int], dict[str, Tensor]] = {}
        self._count = 0.0

    @abstractmethod
    def direction(self, grad: Tensor, state: Group) -> Tensor:
        """Update elementwise states, and return a new tensor from which updates are computed."""

    @abstractmethod
    def updates(self, matrices: Sequence[Matrix]) -> list[Tensor]:
        """Return the update of each matrix, and change the matrices' states in place."""

    def create_whole(self, values: Tensor) -> dict[str, Tensor]:
        """Return the initial states of a matrix [M, N] or [E, M, N]."""
        return {}

    def update(self, tensors: Sequence[Tensor], states: Sequence[Group], group: Group) -> None:
        directions = []
        for tensor, state in zip(tensors, states, strict=True):
            assert tensor.grad is not None
            directions.append(self.direction(tensor.grad, state))
        flat = {tensor: each.view(-1) for tensor, each in zip(tensors, directions, strict=True)}
        self._count = float(states[0]["step"])
        for deal in self._dealt(tuple(tensors)):
            pieces = [flat[p.holder].narrow(0, p.offset, p.length) for p in deal.parts]
            updates = deal.updates(pieces, self._of_params)
            for piece, update in zip(pieces, updates, strict=True):
                piece.copy_(update)
        for tensor, direction in zip(tensors, directions, strict=True):
            descend(tensor, direction, group)

    def _of_params(self, wholes: Sequence[tuple[nn.Parameter, Tensor]]) -> list[Tensor]:
        places, matrices = [], []
        for number, (param, whole) in enumerate(wholes):
            for index, rows in self._rows[param]:
                values = whole[..., rows, :]
                matrices.append(Matrix(values, self._states_of(param, index, values), self._count))
                places.append((number, rows))
        results = [torch.zeros_like(whole) for _, whole in wholes]
        for (number, rows), update in zip(places, self.updates(matrices), strict=True):
            results[number][..., rows, :] = update
        return results

    def _states_of(self, param: nn.Parameter, index: int, values: Tensor) -> dict[str, Tensor]:
        key = param, index
        if key not in self._states:
            self._states[key] = states = self.create_whole(values)
            if states and self._count > 1:
                raise RuntimeError(
                    f"{self._matrices[param]} has no optimizer state after {self._count:.0f} "
                    "steps: a weight had no gradient in one of them"
                )
        return self._states[key]

    def _dealt(self, tensors: tuple[Tensor, ...]) -> list[Deal]:
        """Return the assignments of these tensors' matrices to ranks. All ranks must call this."""
        if tensors not in self._deals:
            self._deals[tensors] = list(self._new_deals(tensors))
        return self._deals[tensors]

    def _new_deals(self, tensors: Sequence[Tensor]) -> Iterator[Deal]:
        self._find_parts()
        by_ranks: dict[Ranks, list[OwnedPart]] = {}
        for part in (part for tensor in tensors for part in self._parts.get(tensor, ())):
            by_ranks.setdefault(self._mesh.replicas(shard_of(part.param)), []).append(part)
        for replicas, parts in by_ranks.items():
            yield Deal(parts, replicas, self._mesh)

    def _find_parts(self) -> None:
        for param in self._matrices if not self._parts else ():
            _, holder, offset, length = self.place_of(param)
            start, count = (offset, length) if length > 0 else (0, 0)
            self._parts.setdefault(holder, []).append(OwnedPart(param, holder, start, count))

    def _owned(self, groups: Sequence[Group]) -> Iterator[tuple[nn.Parameter, int, Rows, bool]]:
        """Yield the matrices that this rank updates, with True if it saves their states."""
        self._find_parts()
        keys = [tuple(params) for _, params in joined(groups) if params]
        # ZeRO 3 puts one tensor at a time into a group, and groups are empty between steps.
        keys = keys or [(tensor,) for tensor in self._parts]
        for deal in (deal for key in keys for deal in self._dealt(key)):
            for param, alone in deal.owned:
                for index, rows in self._rows[param]:
                    yield param, index, rows, alone

    def more_states(self, groups: Sequence[Group]) -> dict[str, Tensor]:
        return {
            name: values
            for param, index, _, alone in self._owned(groups)
            for state, stored in self._states.get((param, index), {}).items()
            for name, values in self._named(param, index, state, stored)
            if alone
        }

    def load_more(self, read: Callable[[str], Tensor], groups: Sequence[Group]) -> None:
        for param, index, rows, _ in self._owned(groups):
            *shape, _, columns = over_tensor(shard_of(param), self._mesh.coordinates).full_shape
            holder, count = self.place_of(param)[1], length_of(rows)
            like = torch.empty((*shape, count, columns), dtype=holder.dtype, device="meta")
            states = self.create_whole(like)
            for state, like in states.items():
                parts = [read(name) for name, _ in self._named(param, index, state, like)]
                whole = parts[0] if like.dim() == parts[0].dim() else torch.stack(parts)
                states[state] = whole.to(param.device, like.dtype, copy=True)
            self._states[param, index] = states

    def _named(
        self, param: nn.Parameter, index: int, state: str, stored: Tensor
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, state) for each expert, or once if there are no experts."""
        name = f"{self._matrices[param]}:{index}:{state}"
        experts = expert_numbers(shard_of(param), self._mesh.coordinates)
        if experts is None:
            yield name, stored
        else:
            yield from ((f"{name}:{n}", stored[k]) for k, n in enumerate(experts))


def length_of(rows: Rows) -> int:
    """Return the number of rows."""
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def _present(param: nn.Parameter, matrices: Sequence[Rows]) -> list[tuple[int, Rows]]:
    """Return the indices and rows of those of the layer's matrices that this parameter contains."""
    kept = [cut for cut in shard_of(param).cuts if cut.held is not None]
    if not kept:
        return [*enumerate(matrices)]
    (cut,), starts = kept, [0, *accumulate(kept[0].parts)]
    ranges = [range(starts[part], starts[part + 1]) for part in cut.held or ()]

    def first(rows: Rows) -> int:
        return rows.start if isinstance(rows, slice) else int(rows[0])

    return [(n, rows) for n, rows in enumerate(matrices) if any(first(rows) in r for r in ranges)]
