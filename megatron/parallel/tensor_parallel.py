"""The tensor-parallel region: how activations enter and leave layers that are cut over ranks.

Outside, every rank has the whole activations or, with sequence parallelism, its slice of the
sequence; inside, the whole sequence and a share of the features.

Shapes: B batch, S sequence, a slice of it S/t long on each of t ranks.
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
    """The dtype that autocast gives the inputs of a GEMM; it leaves float64 alone."""
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
    """Sum over ``group`` forward, identity backward. Overwrites ``x``, which must be contiguous and
    needed by nothing else."""
    return _ReduceFromRanks.apply(x, group)


def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    """Sum over ranks each of which computes another part with it, so that its gradient is summed
    too. Overwrites ``x`` like :func:`reduce_from_ranks`."""
    return _EnterRanks.apply(reduce_from_ranks(x, group), group, False)


class _EnterRanks(torch.autograd.Function):
    """The whole sequence forward; backward the sum over the ranks, of a split one this rank's slice
    of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, split: bool) -> Tensor:
        ctx.group, ctx.split = group, split
        return start_gather_sequence(x, group)() if split else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        start = start_scatter_sequence if ctx.split else start_all_reduce
        return start(grad.clone() if not ctx.split else grad, ctx.group)(), None, None


class _ScatterToRanks(torch.autograd.Function):
    """This rank's slice of the sum over the group forward; gathered backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return start_scatter_sequence(x, group)()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return start_gather_sequence(grad, ctx.group)(), None


class _WholeSequence(torch.autograd.Function):
    """Gathered forward; backward this rank's slice of a gradient that is the same on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return start_gather_sequence(x, group)()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.group.size, 1)[ctx.group.rank], None


class _SumGradients(torch.autograd.Function):
    """Identity forward; backward the gradients are summed over the group, all at once."""

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
    """Parameters whose gradients are summed over the group: in one collective, but for those that
    the engine sums once a step, :func:`sum_later`."""
    if group.size == 1:
        return params
    now = [param for param in params if not getattr(param, "summed_later", False)]
    sums = iter(_SumGradients.apply(group, *now) if now else ())
    return tuple(p if getattr(p, "summed_later", False) else next(sums) for p in params)


def summed_as(stand_in: Tensor, param: nn.Parameter) -> None:
    """Make the gradient of what stands in for a parameter be summed when the parameter's is."""
    stand_in.summed_later = getattr(param, "summed_later", False)  # type: ignore[attr-defined]


def sum_later(params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return those of which each tensor-parallel rank computes an addend of the gradient. From then
    on backward passes leave these addends, and the caller sums them."""
    summed = [param for param in params if getattr(param, "summed", False)]
    for param in summed:
        param.summed_later = True  # type: ignore[attr-defined]
    return summed


def sum_at_once(params: Iterable[nn.Parameter]) -> None:
    """Sum the gradients of these in every backward pass again, as where layers use what is computed
    from a parameter in its place."""
    for param in params:
        param.summed_later = False  # type: ignore[attr-defined]


@dataclass(frozen=True)
class TensorParallel:
    """Over which ranks layers are cut, and, with ``sequence``, that activations between them are
    split along the sequence. ``axes`` are groups along other axes than ``tensor`` that some layers
    are cut over, see :meth:`over`. ``experts`` is how the ranks share experts: each has a part of
    every expert (``cut``), they have different ones (``folded``), or all the same (``whole``).
    ``context``: the ranks that divide sequences."""

    group: Group = SINGLE
    sequence: bool = False
    axes: Mapping[tuple[str, ...], Group] = field(default_factory=dict, compare=False)
    experts: str = "cut"
    context: Context = Context()

    @classmethod
    def of(cls, mesh: Mesh, parallel: ParallelConfig | None = None) -> TensorParallel:
        """The groups of a mesh; without ``parallel`` activations are whole."""
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
        """This rank's place, for parameters that are cut over the groups."""
        single = {axes[0]: group for axes, group in self.axes.items() if len(axes) == 1}
        groups = {**single, "tensor": self.group}
        return {axis: (group.rank, group.size) for axis, group in groups.items()}

    def over(self, *axes: str) -> Group:
        """The ranks that differ from this one along these axes only, slowest axis first."""
        return self.group if axes == ("tensor",) else self.axes.get(axes, SINGLE)

    @property
    def slices(self) -> int:
        return self.group.size if self.sequence else 1

    @property
    def split(self) -> bool:
        return self.slices > 1

    @property
    def whole(self) -> TensorParallel:
        """For activations that every rank has whole, in spite of ``sequence`` and ``context``."""
        return replace(self, sequence=False, context=Context())

    @contextlib.contextmanager
    def unsplit(self) -> Iterator[None]:
        """Within the block no layer that has this object splits activations, whatever ``sequence``
        and ``context`` say: for generation, whose steps have few tokens."""
        before = vars(self).copy()
        vars(self).update(sequence=False, context=Context())
        try:
            yield
        finally:
            vars(self).update(before)

    def whole_sequence(self, x_BSH: Tensor) -> Tensor:
        """All tokens [B, S, H] on every rank; each then computes the same with them, and the
        gradient of a token goes to the rank that has it."""
        return self.context.whole(self.whole_part(x_BSH), 1)

    def whole_part(self, x_BSH: Tensor) -> Tensor:
        """The same of the tokens of this context rank, on its tensor-parallel ranks."""
        return _WholeSequence.apply(x_BSH, self.group) if self.split else x_BSH

    def take(self, x_BSH: Tensor, positions_GP: Tensor) -> Tensor:
        """The tokens [G, P, H] at positions of the whole sequence, each G-th part of the rows one
        after another; with sequence parallelism this rank's slice [G, P/t, H] of them, wherever in
        the sequence they are."""
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
        """Activations [B, S/t, I] of outside for cut layers, [B, S, I], each of which computes an
        addend of their gradient; ``column_linear`` does it together with its GEMM."""
        if self.group.size == 1:
            return x_BSI
        return _EnterRanks.apply(x_BSI, self.group, self.split)

    def leave(self, x_BSO: Tensor) -> Tensor:
        """Sums the addends that cut layers compute on each rank; with sequence parallelism this
        rank's slice [B, S/t, O] of the sum. The inverse of entering by ``column_linear``. ``x_BSO``
        must be contiguous and may be overwritten; nothing else must need it."""
        if self.split:
            return _ScatterToRanks.apply(x_BSO, self.group)
        return x_BSO if self.group.size == 1 else reduce_from_ranks(x_BSO, self.group)

    def shared(self, *params: Tensor) -> tuple[Tensor, ...]:
        """Parameters for use outside: where every rank applies them to its slice only, their
        gradients are summed over the ranks, see :func:`sum_gradients`."""
        return sum_gradients(self.group, *params) if self.split else params

    def over_heads(self, *params: Tensor) -> tuple[Tensor, ...]:
        """Parameters for use inside that every rank applies to each of its heads alike: their
        gradients are summed over the ranks. Where ranks share a key head, each has the part of the
        gradient that comes from its own queries, so the sum counts nothing twice."""
        return sum_gradients(self.group, *params)

    def own(self, x: Tensor, dim: int) -> Tensor:
        """This rank's slice, along the sequence dimension ``dim``, of a tensor that is the same on
        every rank."""
        return x.chunk(self.group.size, dim)[self.group.rank] if self.split else x

    def random(self) -> contextlib.AbstractContextManager[None]:
        """Random numbers for activations outside: they differ between ranks that have slices, or
        parts of a sequence."""
        return tensor_parallel_random(*[self.group] * self.split, self.context.group)

    def random_inside(self) -> contextlib.AbstractContextManager[None]:
        """Random numbers for activations of cut layers: they differ between all ranks."""
        return tensor_parallel_random(self.group, self.context.group)


def _rows(x_BSH: Tensor, positions_GP: Tensor) -> Tensor:
    x_TH, groups = x_BSH.flatten(0, 1), len(positions_GP)
    length = len(x_TH) // groups
    first_G = torch.arange(0, groups * length, length, device=positions_GP.device)
    rows = (positions_GP + first_G[:, None]).flatten()
    return x_TH.index_select(0, rows).unflatten(0, (groups, -1))
