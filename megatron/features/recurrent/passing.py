"""Pieces of sequences on ranks of the context axis, and the states that pass between them.

A rank of the context axis has two pieces of each sequence; without the axis a sequence is one
piece. Layers work on all pieces of a rank at once, as if they were samples, and get from the pieces
before them what they need: the last inputs of a convolution, or the state of a recurrence. Nothing
passes from one document to the next.

Shapes: B samples, S tokens of this rank, L tokens of whole sequences, P pieces of this rank (those
of a sample one after the other), T tokens of a piece, C channels; X is any further shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.model.attention_masks import AttentionMasks
from megatron.parallel.context import Context


class _Gathered(torch.autograd.Function):
    """Return the parts of all ranks in the order of the sequence. Ranks use different parts, so a
    part's gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: Context, dim: int) -> Tensor:
        ctx.context, ctx.dim = context, dim
        return context.whole(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.context.group.handle)
        return ctx.context.take(total, ctx.dim), None, None


class Pieces:
    """A rank's pieces of sequences, and the document boundaries in them.

    Args:
        masks: masks of the micro batch, with ``document_ids`` [B, L]; None for a single document.

    Attributes:
        starts: bool [P, T], tokens whose document differs from the previous token's; None where all
            sequences are one document.
        runs: int64 [P, T], documents of the whole sequence that end before a token; None likewise.
    """

    def __init__(self, context: Context, masks: AttentionMasks | None = None) -> None:
        self.context = context
        self.starts: Tensor | None = None
        self.runs: Tensor | None = None
        self._runs_BL: Tensor | None = None
        ids_BL = None if masks is None else masks.document_ids
        if ids_BL is not None:
            starts_BL = F.pad(ids_BL[:, 1:] != ids_BL[:, :-1], (1, 0))
            self._runs_BL = starts_BL.cumsum(1)
            self.starts = self.folded(context.take(starts_BL, 1))
            self.runs = self.folded(context.take(self._runs_BL, 1))

    def folded(self, x: Tensor) -> Tensor:
        """[B, S, X] as pieces [P, T, X]."""
        return x if self.context.size == 1 else x.unflatten(1, (2, -1)).flatten(0, 1)

    def unfolded(self, x: Tensor) -> Tensor:
        """[P, T, X] as parts of sequences [B, S, X]."""
        return x if self.context.size == 1 else x.unflatten(0, (-1, 2)).flatten(1, 2)

    def connected(self, distance: int) -> Tensor | None:
        """Return bool [P, T]: True if a token's document began at least ``distance`` tokens
        earlier, or at the start of the sequence; None if all sequences are one document."""
        if self._runs_BL is None:
            return None
        runs_BL = self._runs_BL
        earlier_BL = F.pad(runs_BL, (distance, 0))[:, : runs_BL.shape[1]]
        return self.folded(self.context.take(runs_BL == earlier_BL, 1))

    def before(self, x_PTC: Tensor, count: int) -> Tensor:
        """Return the last ``count`` tokens before each piece, [P, count, C], of any document; zeros
        before the sequence."""
        if self.context.size == 1:
            return x_PTC.new_zeros(x_PTC.shape[0], count, x_PTC.shape[2])
        width = min(count, x_PTC.shape[1])
        ends_BSC = self.unfolded(x_PTC[:, -width:])
        ends_BLC = F.pad(_Gathered.apply(ends_BSC, self.context, 1), (0, 0, count, 0))
        parts = [ends_BLC[:, n * width : n * width + count] for n in self.context.pieces]
        return torch.stack(parts, 1).flatten(0, 1)

    def states_before(
        self, factors: Tensor, addends: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """The state before each piece, [P, X], of a recurrence that starts from zeros and for which
        a piece leads from a state to ``multiply`` (factor, state) + addend. Factors [P, ...] are
        zeros where the piece has the start of a document."""
        if self.context.size == 1:
            return torch.zeros_like(addends)
        factors, addends = (
            _Gathered.apply(x.unflatten(0, (-1, 2)), self.context, 1) for x in (factors, addends)
        )
        states = [torch.zeros_like(addends[:, 0])]
        for piece in range(factors.shape[1] - 1):
            states.append(multiply(factors[:, piece], states[-1]) + addends[:, piece])
        return torch.stack([states[n] for n in self.context.pieces], 1).flatten(0, 1)
