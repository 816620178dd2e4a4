"""Tensor-parallel layers. Shapes: B batch, S sequence, I input, O output, V vocabulary, H hidden;
a width followed by P is one rank's share of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.parallel.collectives import copy_to_ranks, reduce_from_ranks
from megatron.parallel.groups import Group
from megatron.parallel.shard import Init, Shard, parameter


class ColumnParallelLinear(nn.Module):
    """y = x A^T + b with the output features cut over the ranks of ``group``.

    Args:
        inputs: width I of the input.
        outputs: widths of the fused outputs, each cut by itself; O is their sum.
        bias: whether there is a bias.
        init: initial values of the weight; the bias starts at zero.
        group: the tensor-parallel group.
    """

    def __init__(
        self, inputs: int, outputs: Sequence[int], *, bias: bool, init: Init, group: Group
    ) -> None:
        super().__init__()
        self.group = group
        parts, total = tuple(outputs), sum(outputs)
        self.weight = parameter(Shard((total, inputs), 0, parts), init, group.size)
        self.bias = parameter(Shard((total,), 0, parts), Init(), group.size) if bias else None

    def forward(self, x_BSI: Tensor) -> Tensor:
        """[B, S, I] on every rank to this rank's [B, S, OP]."""
        return F.linear(copy_to_ranks(x_BSI, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """y = x A^T + b with the input features cut over the ranks of ``group``.

    Args:
        inputs: width I of the whole input.
        outputs: width O of the output.
        bias: whether there is a bias; it is added once, after the sum over ranks.
        init: initial values of the weight; the bias starts at zero.
        group: the tensor-parallel group.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool, init: Init, group: Group) -> None:
        super().__init__()
        self.group = group
        self.weight = parameter(Shard((outputs, inputs), 1), init, group.size)
        self.bias = parameter(Shard((outputs,)), Init(), group.size) if bias else None

    def forward(self, x_BSIP: Tensor) -> Tensor:
        """This rank's [B, S, IP] to [B, S, O] on every rank."""
        if self.group.size == 1:
            return F.linear(x_BSIP, self.weight, self.bias)
        y_BSO = reduce_from_ranks(F.linear(x_BSIP, self.weight), self.group)
        return y_BSO if self.bias is None else y_BSO + self.bias


class VocabParallelEmbedding(nn.Module):
    """Token table with its rows cut over the ranks of ``group``; also the output head that shares
    its weights.

    Args:
        rows: rows of the table, padding included; divisible by the group's size.
        unpadded: rows that are tokens.
        width: width H of an embedding.
        init: initial values.
        group: the tensor-parallel group.
    """

    def __init__(self, rows: int, unpadded: int, width: int, *, init: Init, group: Group) -> None:
        super().__init__()
        self.group = group
        self.weight = parameter(Shard((rows, width), 0, unpadded=unpadded), init, group.size)
        self.rows_local = rows // group.size
        self.first_row = group.rank * self.rows_local

    def forward(self, x: Tensor, project: bool = False) -> Tensor:
        """Token ids [B, S] to embeddings [B, S, H]; with ``project`` hidden states [B, S, H] to
        this rank's logits [B, S, VP].

        Both go through ``forward`` because ZeRO 3 gathers the weight around module calls.
        """
        if project:
            return F.linear(copy_to_ranks(x, self.group), self.weight)
        if self.group.size == 1:
            return F.embedding(x, self.weight)
        rows_BS = x - self.first_row
        elsewhere_BS = (rows_BS < 0) | (rows_BS >= self.rows_local)
        found_BSH = F.embedding(rows_BS.masked_fill(elsewhere_BS, 0), self.weight)
        found_BSH = found_BSH.masked_fill(elsewhere_BS.unsqueeze(-1), 0.0)
        return reduce_from_ranks(found_BSH, self.group)


class ReplicatedEmbedding(nn.Module):
    """Table that every rank holds whole (learned positions).

    Args:
        rows: number of rows.
        width: width H of a row.
        init: initial values.
    """

    def __init__(self, rows: int, width: int, *, init: Init) -> None:
        super().__init__()
        self.weight = parameter(Shard((rows, width)), init, 1)

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Row ids [B, S] to [B, S, H]."""
        return F.embedding(ids_BS, self.weight)
