"""Tensor-parallel region: how activations enter and leave layers that are sharded over ranks.

Outside the region, every rank has the full activations or, with sequence parallelism, its slice of
the sequence. Inside, it has the full sequence and a share of the features.

Shapes: B batch, S sequence, of which each of t ranks has a slice of length S/t.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config import ParallelConfig
from megatron.parallel.collectives import (
    start_all_reduce,
    start_gather_sequence,
    start_scatter_sequence,
    traced,
)
from megatron.parallel.context import Context
from megatron.parallel.mesh import SAMPLES, SINGLE, Coordinates, Group, Mesh
from megatron.parallel.random import tensor_parallel_random


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype to which autocast converts the inputs of a GEMM. float64 stays unchanged."""
    device = x.device.type
    if x.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


class _ReduceFromRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        if not traced():
            ctx.mark_dirty(x)
        return start_all_reduce(x, group)()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def reduce_from_ranks(x: Tensor, group: Group) -> Tensor:
    """Sum over ``group`` in the forward pass, and pass the gradient through unchanged. ``x`` is
    overwritten. It must be contiguous and not needed elsewhere."""
    return _ReduceFromRanks.apply(x, group)


def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    """Sum over ranks that use the result for different parts of a computation, so that gradients
    are summed over the ranks too. ``x`` is overwritten as by :func:`reduce_from_ranks`."""
    return _EnterRanks.apply(reduce_from_ranks(x, group), group, False)


class _EnterRanks(torch.autograd.Function):
    """Forward: the whole sequence, gathered if it is split. Backward: the sum over the ranks or, if
    the sequence is split, this rank's slice of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, split: bool) -> Tensor:
        ctx.group, ctx.split = group, split
        return start_gather_sequence(x, group)() if split else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        start = start_scatter_sequence if ctx.split else start_all_reduce
        return start(grad.clone() if not ctx.split else grad, ctx.group)(), None, None


class _ScatterToRanks(torch.autograd.Function):
    """Forward: this rank's slice of the sum over the group. Backward: all-gather the slices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return start_scatter_sequence(x, group)()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return start_gather_sequence(grad, ctx.group)(), None


class _WholeSequence(torch.autograd.Function):
    """Forward: all-gather. Backward: this rank's slice of a gradient that all ranks share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return start_gather_sequence(x, group)()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.group.size, 1)[ctx.group.rank], None


class _SumGradients(torch.autograd.Function):
    """Forward: identity. Backward: sum the gradients over the group, all in one collective."""

    @staticmethod
    def forward(ctx: Any, group: Group, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(param.view_as(param) for param in params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        sums = start_all_reduce(flat, ctx.group)().split([grad.numel() for grad in grads])
        return None, *(total.view_as(grad) for total, grad in zip(sums, grads, strict=True))


def sum_gradients(group: Group, *params: Tensor) -> tuple[Tensor, ...]:
    """Return the parameters such that their gradients are summed over the group in one collective.
    Parameters marked by :func:`sum_later` are excluded: the engine sums their gradients."""
    if group.size == 1:
        return params
    now = [param for param in params if not getattr(param, "summed_later", False)]
    sums = iter(_SumGradients.apply(group, *now) if now else ())
    return tuple(p if getattr(p, "summed_later", False) else next(sums) for p in params)


def summed_as(stand_in: Tensor, param: nn.Parameter) -> None:
    """Mark a substitute for a parameter, so that its gradient is summed when the parameter's is."""
    stand_in.summed_later = getattr(param, "summed_later", False)  # type: ignore[attr-defined]


def sum_later(params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Mark and return the parameters whose gradient is computed partly on each tensor-parallel
    rank. From then on, the caller must sum their gradients; backward passes no longer do."""
    summed = [param for param in params if getattr(param, "summed", False)]
    for param in summed:
        param.summed_later = True  # type: ignore[attr-defined]
    return summed


def sum_at_once(params: Iterable[nn.Parameter]) -> None:
    """Undo :func:`sum_later`: gradients of these parameters are summed in every backward pass. This
    is needed if layers use a tensor computed from a parameter instead of the parameter itself."""
    for param in params:
        param.summed_later = False  # type: ignore[attr-defined]


@dataclass(frozen=True)
class TensorParallel:
    """Tensor-parallel group, over whose ranks layers are sharded. With ``sequence``, activations
    between these layers are split along the sequence. ``axes`` are groups along axes other than
    ``tensor``, over which some layers are sharded, see :meth:`over`. ``experts`` is how ranks share
    experts: each has a slice of every expert (``cut``), different experts (``folded``), or all of
    them (``whole``). ``context`` is the context-parallel group."""

    group: Group = SINGLE
    sequence: bool = False
    axes: Mapping[tuple[str, ...], Group] = field(default_factory=dict, compare=False)
    experts: str = "cut"
    context: Context = Context()

    @classmethod
    def of(cls, mesh: Mesh, parallel: ParallelConfig | None = None) -> TensorParallel:
        """Return the object for the groups of a mesh. Without ``parallel``, there is no sequence
        parallelism."""
        further: tuple[tuple[str, ...], ...] = (("expert",), ("expert", "tensor"), SAMPLES)
        axes = {each: mesh.group(*each) for each in further}
        if parallel is None:
            return cls(mesh.tensor, axes=axes, context=Context(mesh.group("context")))
        inner = (*parallel.hierarchical_context_parallel_sizes, 1)[0]
        context = Context(mesh.group("context"), parallel.cp_comm_type, inner)
        experts = parallel.experts_over_tensor
        return cls(mesh.tensor, parallel.sequence_parallel, axes, experts, context)

    @property
    def coordinates(self) -> Coordinates:
        """This rank's coordinates, for parameters that are sharded over the groups."""
        single = {axes[0]: group for axes, group in self.axes.items() if len(axes) == 1}
        groups = {**single, "tensor": self.group}
        return {axis: (group.rank, group.size) for axis, group in groups.items()}

    def over(self, *axes: str) -> Group:
        """Return the ranks that differ from this one along these axes only, slowest axis first."""
        return self.group if axes == ("tensor",) else self.axes.get(axes, SINGLE)

    @property
    def slices(self) -> int:
        return self.group.size if self.sequence else 1

    @property
    def split(self) -> bool:
        return self.slices > 1

    @property
    def whole(self) -> TensorParallel:
        """Copy of this object that never splits activations along the sequence."""
        return replace(self, sequence=False, context=Context())

    @contextlib.contextmanager
    def unsplit(self) -> Iterator[None]:
        """In this context, no layer that has this object splits activations along the sequence.
        Generation needs this, because its steps have few tokens."""
        before = vars(self).copy()
        vars(self).update(sequence=False, context=Context())
        try:
            yield
        finally:
            vars(self).update(before)

    def whole_sequence(self, x_BSH: Tensor) -> Tensor:
        """Return all tokens [B, S, H] on every rank. Every rank must compute the same with them. In
        the backward pass, each token's gradient then goes to the rank that has the token."""
        return self.context.whole(self.whole_part(x_BSH), 1)

    def whole_part(self, x_BSH: Tensor) -> Tensor:
        """Return all tokens of this context rank on each of its tensor-parallel ranks."""
        return _WholeSequence.apply(x_BSH, self.group) if self.split else x_BSH

    def take(self, x_BSH: Tensor, positions_GP: Tensor) -> Tensor:
        """Return the tokens [G, P, H] at positions of the full sequence. The B rows are divided
        into G groups, and each group's rows are concatenated. With sequence parallelism, return
        this rank's slice [G, P/t, H] of the result, whichever ranks have its tokens."""
        if not self.split:
            return _rows(x_BSH, positions_GP)
        length = x_BSH.shape[1]
        whole = length * self.group.size
        own_GP = positions_GP % whole - self.group.rank * length
        elsewhere_GP = (own_GP < 0) | (own_GP >= length)
        here_GP = (positions_GP // whole * length + own_GP).masked_fill(elsewhere_GP, 0)
        found_GPH = _rows(x_BSH, here_GP)
        return self.leave(found_GPH.masked_fill(elsewhere_GP.unsqueeze(-1), 0.0))

    def enter(self, x_BSI: Tensor) -> Tensor:
        """Gather activations [B, S/t, I] from outside the region to [B, S, I] for layers inside.
        The backward pass sums the gradient over the ranks. ``column_linear`` includes this step."""
        if self.group.size == 1:
            return x_BSI
        return _EnterRanks.apply(x_BSI, self.group, self.split)

    def leave(self, x_BSO: Tensor) -> Tensor:
        """Sum the partial results of layers over the ranks, after ``column_linear``. With sequence
        parallelism, return this rank's slice [B, S/t, O] of the sum. ``x_BSO`` must be contiguous.
        It may be overwritten, so it must not be needed elsewhere."""
        if self.split:
            return _ScatterToRanks.apply(x_BSO, self.group)
        return x_BSO if self.group.size == 1 else reduce_from_ranks(x_BSO, self.group)

    def shared(self, *params: Tensor) -> tuple[Tensor, ...]:
        """Return parameters for use outside the region. If every rank applies them to its slice of
        the sequence only, :func:`sum_gradients` sums their gradients over the ranks."""
        return sum_gradients(self.group, *params) if self.split else params

    def over_heads(self, *params: Tensor) -> tuple[Tensor, ...]:
        """Return parameters for use inside the region that every rank applies to each of its heads.
        Their gradients are summed over the ranks. If ranks share a key head, each has only the
        gradient that its own queries cause, so nothing is counted twice."""
        return sum_gradients(self.group, *params)

    def own(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's slice along the sequence dimension ``dim`` of a tensor that is the
        same on every rank."""
        return x.chunk(self.group.size, dim)[self.group.rank] if self.split else x

    def random(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for random numbers outside the region. They differ between ranks that
        have different slices or chunks of a sequence."""
        return tensor_parallel_random(*[self.group] * self.split, self.context.group)

    def random_inside(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for random numbers inside the region. They differ between all ranks."""
        return tensor_parallel_random(self.group, self.context.group)


def _rows(x_BSH: Tensor, positions_GP: Tensor) -> Tensor:
    x_TH, groups = x_BSH.flatten(0, 1), len(positions_GP)
    length = len(x_TH) // groups
    first_G = torch.arange(0, groups * length, length, device=positions_GP.device)
    rows = (positions_GP + first_G[:, None]).flatten()
    return x_TH.index_select(0, rows).unflatten(0, (groups, -1))
