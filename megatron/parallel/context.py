"""Context parallelism: ranks that divide each sequence among them.

A sequence is cut into 2P chunks for P ranks. Rank r has the chunks r and 2P - 1 - r, so that all
ranks have the same amount of work under a causal mask (zig-zag, as in Megatron-LM). Every rank
computes the same losses, those of the whole sequence. Gradients are averaged over context ranks as
over other replicas, so the gradient of a rank's contribution to a sum is multiplied by P.

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
    """Context-parallel group, whose ranks divide sequences.

    Attributes:
        kinds: communication pattern of attention: ``p2p``, ``a2a``, ``allgather`` or ``a2a+p2p``.
          One value applies to all blocks; otherwise there is one per block. Empty means p2p.
        inner: number of neighbouring ranks that exchange heads in ``a2a+p2p``.
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
        """Return the communication pattern of a block's attention."""
        kinds = self.kinds or ("p2p",)
        return kinds[layer if len(kinds) > 1 else 0]

    @property
    def pieces(self) -> tuple[int, int]:
        """Indices of this rank's two chunks among the 2P chunks of a sequence."""
        return self.rank, 2 * self.size - 1 - self.rank

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """Return this rank's token positions in a sequence of ``length`` tokens, int64 [s]."""
        return self.take(torch.arange(length, device=device), 0)

    def take(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's chunks of a tensor whose dimension ``dim`` is the whole sequence."""
        if self.size == 1:
            return x
        length = x.shape[dim]
        assert length % (2 * self.size) == 0, (length, self.size)
        width = length // (2 * self.size)
        return torch.cat([x.narrow(dim, piece * width, width) for piece in self.pieces], dim)

    def local(self, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Map positions in concatenated sequences of ``length`` tokens to positions in this rank's
        concatenated chunks. Tokens of other ranks are mapped to 0. Also return a mask that is True
        for this rank's tokens."""
        width = length // (2 * self.size)
        first, second = (positions % length // width == piece for piece in self.pieces)
        within = positions // length * 2 * width + positions % width
        here = first | second
        return torch.where(second, within + width, within).masked_fill(~here, 0), here

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks. Every rank must use the result in the same way."""
        return _Sum.apply(x, self.group) if self.size > 1 else x

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """All-gather the ranks' chunks in the order of the sequence. Every rank must use the result
        in the same way."""
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
