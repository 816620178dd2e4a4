"""Pieces of sequences on context-parallel ranks, and the states that pass between them.

A context-parallel rank has two pieces of each sequence. Without context parallelism, a sequence is
one piece. Layers process all pieces of a rank at once, as if they were samples. From the preceding
pieces they get the last inputs of a convolution, or the state of a recurrence. Nothing passes from
one document to the next.

Shapes: B samples, S tokens of this rank, L tokens of whole sequences, P pieces of this rank (those
of a sample are consecutive), T tokens of a piece, C channels; X is any further shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.model.attention_masks import AttentionMasks
from megatron.model.layer_list import LayerCache
from megatron.parallel.context import Context


class RecurrentCache(LayerCache, Protocol):
    """States of sequences, for generation."""

    def recur(
        self,
        layer: int,
        inputs_BSX: Tensor,
        step: Callable[[Tensor, tuple[Tensor, ...] | None], tuple[Tensor, tuple[Tensor, ...]]],
    ) -> Tensor:
        """[B, S, Y], from inputs [B, S, X], of a block whose state has the same size after any
        number of tokens. ``step`` maps inputs [b, s, X] of sequences that continue, and the states
        before them, each [b, ...] (None at the start), to their outputs [b, s, Y] and the states
        after them. It is called for pieces of a prompt (b = 1) and for single tokens (s = 1) of
        several sequences, must not communicate, and a sequence's results must not depend on the
        others. The memory of the block is :class:`~megatron.config.sections.States`; the states are
        of its shapes and dtype, whatever that of the inputs."""
        ...


class _Gathered(torch.autograd.Function):
    """All-gather the slices of all ranks in sequence order. Each rank uses other elements of the
    result, so the backward pass sums the gradient of a slice over the ranks."""

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
    """Pieces of sequences on this rank, and the document boundaries in them.

    Args:
        masks: masks of the micro batch, with ``document_ids`` [B, L]; None for a single document.

    Attributes:
        starts: bool [P, T], True for tokens whose document differs from the previous token's. None
            if every sequence is a single document.
        runs: int64 [P, T], number of documents that end before each token, counted from the start
            of the whole sequence. None if every sequence is a single document.
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
        """Reshape [B, S, X] to pieces [P, T, X]."""
        return x if self.context.size == 1 else x.unflatten(1, (2, -1)).flatten(0, 1)

    def unfolded(self, x: Tensor) -> Tensor:
        """Reshape pieces [P, T, X] to this rank's slices of sequences, [B, S, X]."""
        return x if self.context.size == 1 else x.unflatten(0, (-1, 2)).flatten(1, 2)

    def connected(self, distance: int) -> Tensor | None:
        """Return a mask, bool [P, T]: True if the token ``distance`` positions earlier belongs to
        the same document, or would be before the sequence and the token is in the first document.
        Return None if every sequence is a single document."""
        if self._runs_BL is None:
            return None
        runs_BL = self._runs_BL
        earlier_BL = F.pad(runs_BL, (distance, 0))[:, : runs_BL.shape[1]]
        return self.folded(self.context.take(runs_BL == earlier_BL, 1))

    def before(self, x_PTC: Tensor, count: int) -> Tensor:
        """Return the ``count`` tokens before each piece, [P, count, C], regardless of their
        document. Tokens before the start of the sequence are zeros. Collective if there are several
        ranks."""
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
        """Return the state before each piece, [P, X], of a recurrence that starts from zeros. A
        piece changes a state to ``multiply(factor, state)`` + addend. ``factors`` [P, ...] must be
        zero for pieces in which a document starts. Collective if there are several ranks."""
        if self.context.size == 1:
            return torch.zeros_like(addends)
        factors, addends = (
            _Gathered.apply(x.unflatten(0, (-1, 2)), self.context, 1) for x in (factors, addends)
        )
        states = [torch.zeros_like(addends[:, 0])]
        for piece in range(factors.shape[1] - 1):
            states.append(multiply(factors[:, piece], states[-1]) + addends[:, piece])
        return torch.stack([states[n] for n in self.context.pieces], 1).flatten(0, 1)
