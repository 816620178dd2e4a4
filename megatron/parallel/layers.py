"""Linear layers and the token embedding, sharded over the tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.kernels.sums import looked_up
from megatron.parallel.cross_entropy import linear_cross_entropy
from megatron.parallel.linear import LinearKernel, LinearMap, column_linear, linear
from megatron.parallel.loss_head import LossHead, Targets
from megatron.parallel.shard import Cut, Init, Shard, parameter
from megatron.parallel.tensor_parallel import TensorParallel

RowMap = tuple[Tensor | None, Tensor]
"""A mask of the rows that use a weight, bool [S, 1] (None for all rows), and the weight."""


class LayerAdapters(Protocol):
    """Adapters of a linear layer, which add to its outputs. The layer owns their parameters."""

    def outputs(
        self, layer: ParallelLinear, x_BSI: Tensor, maps: Sequence[LinearMap]
    ) -> tuple[Tensor, ...]:
        """Return the outputs of :func:`column_linear` with the adapters' outputs added. For a layer
        sharded along its inputs, sum over all ranks (:meth:`TensorParallel.leave`)."""
        ...

    def changed(self, layer: ParallelLinear, weight: Tensor) -> Sequence[RowMap]:
        """Return the weight [OP, I] of a layer sharded along its outputs with the adapters merged,
        and without gradients: first for all rows, then for some rows only."""
        ...


class ParallelLinear(nn.Module):
    """Linear layer sharded over the ranks of ``tp``. Its widths are those of the full layer.
    ``init`` initialises the weights. Biases start at zero."""

    matrices: ClassVar[tuple[str, ...]] = ()
    """Names of the matrices fused in the weight, in order. Empty for a single matrix."""
    adapters: LayerAdapters | None = None
    kernel: LinearKernel | None = None
    weight_kept: Any = None
    """Data that the kernel stores for :attr:`weight` between steps. A layer with a second weight
    has a second attribute, named after that weight."""

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp

    def _parameters_of(
        self, outputs: int, inputs: int, cut: Cut, bias: bool, init: Init, part: bool = False
    ) -> tuple[nn.Parameter, nn.Parameter | None]:
        names = ("weight", "bias") if part else (None, None)
        weight = Shard((outputs, inputs), (cut,), whole=names[0])
        of_bias = Shard((outputs,), () if cut.dim else (cut,), whole=names[1])
        at, apart = self.tp.coordinates, cut.dim > 0 and self.tp.split
        return (
            parameter(weight, init, at),
            parameter(of_bias, Init(), at, summed=apart) if bias else None,
        )


class ColumnParallelLinear(ParallelLinear):
    """Linear layer y = x A^T + b whose output features are sharded over ranks. ``outputs`` are the
    widths of fused outputs, each of which is sharded separately. O is their sum. ``heads`` is for
    outputs that consist of fewer heads than there are ranks: neighbouring ranks share a head."""

    def __init__(
        self,
        inputs: int,
        outputs: Sequence[int],
        *,
        bias: bool,
        init: Init,
        tp: TensorParallel,
        heads: int | None = None,
    ) -> None:
        super().__init__(tp)
        self.copies = 1 if heads is None else max(1, tp.group.size // heads)
        cut = Cut(0, parts=tuple(outputs), copies=self.copies)
        self.weight, self.bias = self._parameters_of(sum(outputs), inputs, cut, bias, init)

    def forward(self, x_BSI: Tensor) -> Tensor:
        """Map [B, S, I] to this rank's output features for the whole sequence, [B, S, OP]."""
        whole = LinearMap(self.weight, self.bias, self.copies, self.kernel, self.weight_kept)
        if self.adapters is not None:
            (y_BSO,) = self.adapters.outputs(self, x_BSI, (whole,))
        else:
            (y_BSO,) = column_linear(x_BSI, (whole,), self.tp)
        return y_BSO


class QKVParallelLinear(ParallelLinear):
    """Query, key and value projections in one GEMM, with heads sharded over ranks. If there are
    fewer key and value heads than ranks, neighbouring ranks share a head. Its weights are then
    separate parameters, ``kv_weight`` and ``kv_bias``, with the canonical names of the queries'
    parameters. The number of ranks must divide ``heads``, and divide ``kv_heads`` or be a multiple
    of it. With ``gated``, a query has twice ``head_dim`` channels; the last half is its gate."""

    matrices = ("q", "k", "v")
    kv_weight_kept: Any = None

    def __init__(
        self,
        inputs: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        bias: bool,
        init: Init,
        tp: TensorParallel,
        gated: bool = False,
    ) -> None:
        super().__init__(tp)
        self.copies = max(1, tp.group.size // kv_heads)
        self.kv_width = max(1, kv_heads // tp.group.size) * head_dim
        parts = (heads * head_dim * (1 + gated), kv_heads * head_dim, kv_heads * head_dim)
        fused, rows = self.copies == 1, sum(parts)
        cut = Cut(0, parts=parts, held=None if fused else (0,))
        self.weight, self.bias = self._parameters_of(rows, inputs, cut, bias, init, part=True)
        self.kv_weight: nn.Parameter | None = None
        self.kv_bias: nn.Parameter | None = None
        if not fused:
            cut = Cut(0, parts=parts, held=(1, 2), copies=self.copies)
            self.kv_weight, self.kv_bias = self._parameters_of(
                rows, inputs, cut, bias, init, part=True
            )

    def forward(self, x_BSI: Tensor, apart: bool = True) -> Sequence[Tensor]:
        """Map [B, S, I] to this rank's queries, keys and values for the whole sequence, with the
        heads concatenated in the last dimension. If not ``apart``, return one output per weight."""
        maps = [LinearMap(self.weight, self.bias, 1, self.kernel, self.weight_kept)]
        if self.kv_weight is not None:
            both = self.kv_weight, self.kv_bias
            maps.append(LinearMap(*both, self.copies, self.kernel, self.kv_weight_kept))
        if self.adapters is not None:
            outputs = self.adapters.outputs(self, x_BSI, maps)
        else:
            outputs = column_linear(x_BSI, maps, self.tp)
        if not apart:
            return outputs
        if len(outputs) == 2:
            q, kv = outputs
            k, v = kv.chunk(2, dim=-1)
        else:
            q_width = outputs[0].shape[-1] - 2 * self.kv_width
            q, k, v = outputs[0].split([q_width, self.kv_width, self.kv_width], dim=-1)
        return q, k, v


class RowParallelLinear(ParallelLinear):
    """Linear layer y = x A^T + b whose input features are sharded over ranks. The bias is added
    after the sum over ranks."""

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool, init: Init, tp: TensorParallel
    ) -> None:
        super().__init__(tp)
        self.weight, self.bias = self._parameters_of(outputs, inputs, Cut(1), bias, init)

    def forward(self, x_BSI: Tensor) -> Tensor:
        """Map this rank's input features for the whole sequence, [B, S, IP], to [B, S, O]."""
        if self.adapters is not None:
            (y_BSO,) = self.adapters.outputs(self, x_BSI, (LinearMap(self.weight, self.bias),))
            return y_BSO
        if self.tp.group.size == 1:
            return linear(x_BSI, self.weight, self.bias, self.kernel, self.weight_kept)
        y_BSO = self.tp.leave(linear(x_BSI, self.weight, None, self.kernel, self.weight_kept))
        return y_BSO if self.bias is None else y_BSO + self.tp.shared(self.bias)[0]


class WholeLinear(nn.Module):
    """Linear layer y = x A^T + b, replicated on every rank. ``tp`` determines whether a rank
    applies it only to its slice of the sequence. Biases start at zero."""

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool, init: Init, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.tp = tp
        at = tp.coordinates
        self.weight = parameter(Shard((outputs, inputs)), init, at, tp.split)
        self.bias = parameter(Shard((outputs,)), Init(), at, tp.split) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., I] to [..., O]."""
        return F.linear(x, *self.tp.shared(*self.parameters()))


class Dropout(nn.Module):
    """Dropout outside tensor-parallel layers. Ranks with equal activations draw equal masks."""

    def __init__(self, probability: float, tp: TensorParallel) -> None:
        super().__init__()
        self.probability, self.tp = probability, tp

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Apply dropout to [B, S, H] in training. In evaluation, return the input."""
        if not self.training or not self.probability:
            return x_BSH
        context = self.tp.context
        if context.size > 1 and not self.tp.split:
            # Take this rank's chunks of the mask that a single process would draw.
            samples, length, width = x_BSH.shape
            ones_BSH = x_BSH.new_ones(samples, length * context.size, width)
            return x_BSH * context.take(F.dropout(ones_BSH, self.probability), 1)
        with self.tp.random():
            return F.dropout(x_BSH, self.probability)


Losses = Callable[[Tensor, Tensor, Targets, LossHead, Tensor | None], Any]
"""Function that returns losses, given the arguments of :func:`linear_cross_entropy`."""


class VocabParallelEmbedding(nn.Module):
    """Token embedding whose rows, including padding, are sharded over the ranks of ``head``. It
    also serves as the output head if weights are tied, optionally with a ``bias`` of the logits."""

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
        """Map token ids of the whole sequence to embeddings [B, S, H]. With ``project``, map hidden
        states [B, S, H] to this rank's logits [B, S, VP] instead or, if ``targets`` are given, to
        the loss or the result of ``losses``. All go through ``forward`` because ZeRO 3 gathers the
        weight around module calls."""
        if project and targets is not None:
            x, targets = targets.taken(x, self.tp)
            return (losses or linear_cross_entropy)(x, self.weight, targets, self.head, self.bias)
        if project:
            (logits_BSV,) = column_linear(x, (LinearMap(self.weight, self.bias),), self.tp)
            return self.tp.context.whole(self.head.capped(logits_BSV), 1)
        found_BSH = self._looked_up(x)
        return found_BSH if self.bias is None else ZeroGradient.apply(found_BSH, self.bias)

    def _looked_up(self, ids_BS: Tensor) -> Tensor:
        if self.tp.group.size == 1:
            return looked_up(ids_BS, self.weight)
        rows_BS = ids_BS - self.first_row
        elsewhere_BS = (rows_BS < 0) | (rows_BS >= self.rows_local)
        found_BSH = looked_up(rows_BS.masked_fill(elsewhere_BS, 0), self.weight)
        return self.tp.leave(found_BSH.masked_fill(elsewhere_BS.unsqueeze(-1), 0.0))


class ZeroGradient(torch.autograd.Function):
    """Identity of ``x`` that gives ``param`` a zero gradient. Without it, a pipeline stage that
    only looks up ids would not update its copy of the head's bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, param: Tensor) -> Tensor:
        ctx.like = param.shape, param.dtype, param.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.like
        return grad, torch.zeros(shape, dtype=dtype, device=device)


class WholeEmbedding(nn.Module):
    """Embedding [rows, H] of positions or token types, replicated on every rank."""

    def __init__(self, rows: int, width: int, *, init: Init, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.weight = parameter(Shard((rows, width)), init, tp.coordinates, tp.split)

    def forward(self, ids_S: Tensor) -> Tensor:
        """Map ids of the whole sequence, [S] or [B, S], to embeddings of this rank's slice, [S, H]
        or [B, S, H]."""
        (weight,) = self.tp.shared(self.weight)
        return F.embedding(self.tp.own(ids_S, dim=-1), weight)
