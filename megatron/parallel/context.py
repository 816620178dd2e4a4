"""The context axis: ranks that divide each sequence among them.

A sequence is cut into 2P pieces for P ranks, of which rank r has the pieces r and 2P - 1 - r: under
a causal mask all ranks then have the same work (zig-zag, as in Megatron-LM). Every rank computes
the same losses, of the whole sequence. Gradients are averaged over the axis as over other replicas,
so that the gradient of a rank's share of a sum has the factor P.

Shapes: S whole sequence, s = S / P tokens of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.parallel.collectives import start_all_reduce, start_gather
from megatron.parallel.mesh import SINGLE, Group


@dataclass(frozen=True)
class Context:
    """The ranks that divide sequences.

    Attributes:
        kinds: how blocks communicate, one value for all or one for each: ``p2p``, ``a2a``,
            ``allgather`` or ``a2a+p2p``; empty for p2p.
        inner: neighbouring ranks that exchange heads in ``a2a+p2p``.
    """

    group: Group = SINGLE
    kinds: tuple[str, ...] = ()
    inner: int = 1

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def rank(self) -> int:
        return self.group.rank

    def kind(self, layer: int) -> str:
        """Communication of a block."""
        kinds = self.kinds or ("p2p",)
        return kinds[layer if len(kinds) > 1 else 0]

    @property
    def pieces(self) -> tuple[int, int]:
        """Numbers of this rank's pieces among the 2P of a sequence."""
        return self.rank, 2 * self.size - 1 - self.rank

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """int64 [s]: positions of this rank's tokens in a sequence of ``length`` tokens."""
        return self.take(torch.arange(length, device=device), 0)

    def take(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor, along the dimension of the whole sequence."""
        if self.size == 1:
            return x
        length = x.shape[dim]
        assert length % (2 * self.size) == 0, (length, self.size)
        width = length // (2 * self.size)
        return torch.cat([x.narrow(dim, piece * width, width) for piece in self.pieces], dim)

    def local(self, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Positions in sequences of ``length`` tokens, one sequence after another, to those in this
        rank's parts of the sequences, one after another; and which are in them (elsewhere 0)."""
        width = length // (2 * self.size)
        first, second = (positions % length // width == piece for piece in self.pieces)
        within = positions // length * 2 * width + positions % width
        here = first | second
        return torch.where(second, within + width, within).masked_fill(~here, 0), here

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the ranks, each of which uses it identically."""
        return _Sum.apply(x, self.group) if self.size > 1 else x

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """The parts of all ranks in the order of the sequence; each rank computes the same with
        them."""
        return _Whole.apply(x, self, dim) if self.size > 1 else x


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.size = group.size
        return start_all_reduce(x.clone(memory_format=torch.contiguous_format), group)()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.size, None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: Context, dim: int) -> Tensor:
        ctx.context, ctx.dim = context, dim
        parts = start_gather(x[None], context.group)()
        halves = [part.chunk(2, dim) for part in parts]
        first, second = zip(*halves, strict=True)
        return torch.cat((*first, *reversed(second)), dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.context.take(grad, ctx.dim) * ctx.context.size, None, None
