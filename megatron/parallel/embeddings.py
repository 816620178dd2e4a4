"""The token embedding, cut over the tensor-parallel ranks, and tables that every rank has whole.

Shapes: B batch, S sequence (outside the cut layers a rank's slice of it if the region is split), H
hidden, V vocabulary; VP one rank's share of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.parallel.cross_entropy import linear_cross_entropy, linear_scores
from megatron.parallel.linear import LinearMap, column_linear
from megatron.parallel.loss_head import LossHead, Targets
from megatron.parallel.shard import Cut, Init, Shard, parameter
from megatron.parallel.tensor_parallel import TensorParallel

Losses = Callable[[Tensor, Tensor, Targets, LossHead, Tensor | None], Any]
"""From the arguments of :func:`linear_cross_entropy`."""


class VocabParallelEmbedding(nn.Module):
    """Token embedding with its rows, padding included, cut over the ranks of ``head``; also the
    output head that shares its weights, with a ``bias`` of the logits where it is asked for."""

    def __init__(
        self, rows: int, width: int, *, init: Init, head: LossHead, bias: bool = False
    ) -> None:
        super().__init__()
        self.head, self.tp = head, head.tp
        tp, cuts = head.tp, (Cut(0, unpadded=head.vocab_size),)
        self.weight = parameter(Shard((rows, width), cuts), init, tp.coordinates)
        self.bias = parameter(Shard((rows,), cuts), Init(), tp.coordinates) if bias else None
        self.rows_local = rows // tp.group.size
        self.first_row = tp.group.rank * self.rows_local

    def forward(
        self,
        x: Tensor,
        project: bool = False,
        targets: Targets | None = None,
        losses: Losses | None = None,
    ) -> Any:
        """Token ids of the whole sequence to embeddings [B, S, H]; with ``project`` hidden states
        [B, S, H] to this rank's logits [B, S, VP], or, where there are targets, to the loss or
        their scores, or to what ``losses`` makes of them. All go through ``forward`` because ZeRO 3
        gathers the weight around module calls."""
        if project and targets is not None:
            x, targets = targets.taken(x, self.tp)
            if losses is not None and not targets.scored:
                return losses(x, self.weight, targets, self.head, self.bias)
            over_targets = linear_scores if targets.scored else linear_cross_entropy
            return over_targets(x, self.weight, targets, self.head, self.bias)
        if project:
            (logits_BSV,) = column_linear(x, (LinearMap(self.weight, self.bias),), self.tp)
            return self.head.capped(logits_BSV)
        found_BSH = self._looked_up(x)
        return found_BSH if self.bias is None else _WithZeroGradient.apply(found_BSH, self.bias)

    def _looked_up(self, ids_BS: Tensor) -> Tensor:
        if self.tp.group.size == 1:
            return F.embedding(ids_BS, self.weight)
        rows_BS = ids_BS - self.first_row
        elsewhere_BS = (rows_BS < 0) | (rows_BS >= self.rows_local)
        found_BSH = F.embedding(rows_BS.masked_fill(elsewhere_BS, 0), self.weight)
        return self.tp.leave(found_BSH.masked_fill(elsewhere_BS.unsqueeze(-1), 0.0))


class _WithZeroGradient(torch.autograd.Function):
    """Identity of its first argument; the gradient of the second, a parameter, is zero. Without one
    a pipeline stage that only looks ids up would not update its copy of the head's bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, param: Tensor) -> Tensor:
        ctx.like = param.shape, param.dtype, param.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.like
        return grad, torch.zeros(shape, dtype=dtype, device=device)


class WholeEmbedding(nn.Module):
    """Table [rows, H] of positions or token types, which every rank has whole."""

    def __init__(self, rows: int, width: int, *, init: Init, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.weight = parameter(Shard((rows, width)), init, tp.coordinates)

    def forward(self, ids_S: Tensor) -> Tensor:
        """Ids of the whole sequence, [S] or [B, S], to rows of this rank's slice of it, [S, H] or
        [B, S, H]."""
        (weight,) = self.tp.shared(self.weight)
        return F.embedding(self.tp.own(ids_S, dim=-1), weight)
