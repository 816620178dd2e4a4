"""Tensor-parallel layers. Shapes: B batch, S sequence (outside the cut layers a rank's slice of it
if the region is split), I input, O output, V vocabulary, H hidden; a width followed by P is one
rank's share of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.parallel.column_linear import LinearMap, column_linear
from megatron.parallel.cross_entropy import LossHead, Targets, linear_cross_entropy
from megatron.parallel.float8 import Float8, linear
from megatron.parallel.shard import Cut, Init, Shard, parameter
from megatron.parallel.tensor_parallel import TensorParallel


class ColumnParallelLinear(nn.Module):
    """y = x A^T + b with the output features cut over the ranks of ``tp``.

    Args:
        inputs: width I of the input.
        outputs: widths of the fused outputs, each cut by itself; O is their sum.
        bias: whether there is a bias.
        init: initial values of the weight; the bias starts at zero.
        region: the tensor-parallel ranks.

    Attributes:
        float8: how it multiplies in 8 bits; None, which it starts with, for the format of its
            input.
    """

    float8: Float8 | None = None

    def __init__(
        self, inputs: int, outputs: Sequence[int], *, bias: bool, init: Init, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.tp = tp
        total, cuts = sum(outputs), (Cut(0, parts=tuple(outputs)),)
        self.weight = parameter(Shard((total, inputs), cuts), init, tp.coordinates)
        self.bias = parameter(Shard((total,), cuts), Init(), tp.coordinates) if bias else None

    def forward(self, x_BSI: Tensor) -> Tensor:
        """[B, S, I] to this rank's features of the whole sequence, [B, S, OP]."""
        whole = LinearMap(self.weight, self.bias, float8=self.float8)
        (y_BSO,) = column_linear(x_BSI, (whole,), self.tp.group, self.tp.split)
        return y_BSO


class QKVParallelLinear(nn.Module):
    """Queries, keys and values by one product, heads cut over the ranks of ``tp``.

    With fewer key and value heads than ranks each is held by several neighbouring ranks, whose
    queries attend to it; its weights are then parameters of their own, ``kv_weight`` and
    ``kv_bias``, with the same canonical names as the queries'.

    Args:
        inputs: width I of the input.
        heads: number of query heads, divisible by the ranks.
        kv_heads: number of key and value heads; it divides the number of ranks or is divisible by
            it.
        head_dim: width of a head.
        bias: whether there are biases.
        init: initial values of the weights; biases start at zero.
        region: the tensor-parallel ranks.

    Attributes:
        float8: how it multiplies in 8 bits; None, which it starts with, for the format of its
            input.
    """

    float8: Float8 | None = None

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
    ) -> None:
        super().__init__()
        self.tp = tp
        self.copies = max(1, tp.group.size // kv_heads)
        self.kv_width = max(1, kv_heads // tp.group.size) * head_dim
        parts = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)

        def share(
            held: tuple[int, ...] | None, copies: int
        ) -> tuple[nn.Parameter, nn.Parameter | None]:
            cuts = (Cut(0, parts=parts, held=held, copies=copies),)
            weight = Shard((sum(parts), inputs), cuts, whole="weight")
            of_bias = Shard((sum(parts),), cuts, whole="bias")
            return (
                parameter(weight, init, tp.coordinates),
                parameter(of_bias, Init(), tp.coordinates) if bias else None,
            )

        fused = self.copies == 1
        self.weight, self.bias = share(None if fused else (0,), 1)
        self.kv_weight: nn.Parameter | None = None
        self.kv_bias: nn.Parameter | None = None
        if not fused:
            self.kv_weight, self.kv_bias = share((1, 2), self.copies)

    def forward(self, x_BSI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S, I] to this rank's queries, keys and values of the whole sequence, each with its
        heads side by side in the last dimension."""
        maps = [LinearMap(self.weight, self.bias, float8=self.float8)]
        if self.kv_weight is not None:
            maps.append(LinearMap(self.kv_weight, self.kv_bias, self.copies, self.float8))
        outputs = column_linear(x_BSI, maps, self.tp.group, self.tp.split)
        if len(outputs) == 2:
            q, kv = outputs
            k, v = kv.chunk(2, dim=-1)
        else:
            q_width = outputs[0].shape[-1] - 2 * self.kv_width
            q, k, v = outputs[0].split([q_width, self.kv_width, self.kv_width], dim=-1)
        return q, k, v


class KVParallelLinear(nn.Module):
    """Keys and values by one product, heads cut over the ranks of ``tp``.

    With fewer heads than ranks each is held by several neighbouring ranks.

    Args:
        inputs: width I of the input.
        heads: number of key and value heads; it divides the number of ranks or is divisible by it.
        head_dim: width of a head.
        bias: whether there are biases.
        init: initial values of the weight; the bias starts at zero.
        region: the tensor-parallel ranks.

    Attributes:
        float8: how it multiplies in 8 bits; None, which it starts with, for the dtype of its input.
    """

    float8: Float8 | None = None

    def __init__(
        self,
        inputs: int,
        heads: int,
        head_dim: int,
        *,
        bias: bool,
        init: Init,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.copies = max(1, tp.group.size // heads)
        parts = (heads * head_dim, heads * head_dim)
        cuts, place = (Cut(0, parts=parts, copies=self.copies),), tp.coordinates
        self.weight = parameter(Shard((sum(parts), inputs), cuts), init, place)
        self.bias = parameter(Shard((sum(parts),), cuts), Init(), place) if bias else None

    def forward(self, x_BTI: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, I] to this rank's keys and values of the whole sequence, each with its heads side
        by side in the last dimension."""
        both = LinearMap(self.weight, self.bias, self.copies, self.float8)
        (kv,) = column_linear(x_BTI, (both,), self.tp.group, self.tp.split)
        k, v = kv.chunk(2, dim=-1)
        return k, v


class RowParallelLinear(nn.Module):
    """y = x A^T + b with the input features cut over the ranks of ``tp``.

    Args:
        inputs: width I of the whole input.
        outputs: width O of the output.
        bias: whether there is a bias; it is added once, after the sum over ranks.
        init: initial values of the weight; the bias starts at zero.
        region: the tensor-parallel ranks.

    Attributes:
        float8: how it multiplies in 8 bits; None, which it starts with, for the format of its
            input.
    """

    float8: Float8 | None = None

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool, init: Init, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.tp = tp
        self.weight = parameter(Shard((outputs, inputs), (Cut(1),)), init, tp.coordinates)
        self.bias = parameter(Shard((outputs,)), Init(), tp.coordinates) if bias else None

    def forward(self, x_BSI: Tensor) -> Tensor:
        """This rank's features of the whole sequence [B, S, IP] to [B, S, O]."""
        if self.tp.group.size == 1:
            return linear(x_BSI, self.weight, self.bias, self.float8)
        y_BSO = self.tp.leave(linear(x_BSI, self.weight, None, self.float8))
        return y_BSO if self.bias is None else y_BSO + self.tp.shared(self.bias)[0]


class VocabParallelEmbedding(nn.Module):
    """Token table with its rows cut over the ranks of ``tp``; also the output head that shares
    its weights.

    Args:
        rows: rows of the table, padding included; divisible by the ranks.
        width: width H of an embedding.
        init: initial values.
        head: how hidden states become a loss; it has the region, and how many rows are tokens.
    """

    def __init__(self, rows: int, width: int, *, init: Init, head: LossHead) -> None:
        super().__init__()
        self.head, self.tp = head, head.tp
        tp, cuts = head.tp, (Cut(0, unpadded=head.vocab_size),)
        self.weight = parameter(Shard((rows, width), cuts), init, tp.coordinates)
        self.rows_local = rows // tp.group.size
        self.first_row = tp.group.rank * self.rows_local

    def forward(self, x: Tensor, project: bool = False, targets: Targets | None = None) -> Tensor:
        """Token ids of the whole sequence to embeddings [B, S, H]; with ``project`` hidden states
        [B, S, H] to this rank's logits [B, S, VP] of the whole sequence, or, where there are
        targets, to the loss.

        All go through ``forward`` because ZeRO 3 gathers the weight around module calls.
        """
        if project and targets is not None:
            return linear_cross_entropy(x, self.weight, targets, self.head)
        if project:
            whole = LinearMap(self.weight, None)
            (logits_BSV,) = column_linear(x, (whole,), self.tp.group, self.tp.split)
            return self.head.capped(logits_BSV)
        if self.tp.group.size == 1:
            return F.embedding(x, self.weight)
        rows_BS = x - self.first_row
        elsewhere_BS = (rows_BS < 0) | (rows_BS >= self.rows_local)
        found_BSH = F.embedding(rows_BS.masked_fill(elsewhere_BS, 0), self.weight)
        return self.tp.leave(found_BSH.masked_fill(elsewhere_BS.unsqueeze(-1), 0.0))


class PositionEmbedding(nn.Module):
    """Table of learned positions, which every rank holds whole.

    Args:
        rows: number of positions.
        width: width H of a row.
        init: initial values.
        region: the tensor-parallel ranks.
    """

    def __init__(self, rows: int, width: int, *, init: Init, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.weight = parameter(Shard((rows, width)), init, tp.coordinates)

    def forward(self, ids_S: Tensor) -> Tensor:
        """Positions of the whole sequence, [S] or [B, S], to rows of those that this rank holds,
        [S, H] or [B, S, H]."""
        (weight,) = self.tp.shared(self.weight)
        return F.embedding(self.tp.own(ids_S, dim=-1), weight)


class Dropout(nn.Module):
    """Dropout outside the cut layers.

    Args:
        probability: of a zero.
        region: the tensor-parallel ranks; where they hold the same, they draw the same.
    """

    def __init__(self, probability: float, tp: TensorParallel) -> None:
        super().__init__()
        self.probability, self.tp = probability, tp

    def forward(self, x_BSH: Tensor) -> Tensor:
        """[B, S, H] to [B, S, H]."""
        if not self.training or not self.probability:
            return x_BSH
        with self.tp.random():
            return F.dropout(x_BSH, self.probability)
