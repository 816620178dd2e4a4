"""How one parameter of ours lies in the tensors of Hugging Face: a few reorderings, each with its
inverse.

Shapes: N query heads, K key and value heads, D head width, F inner width of the MLP, H hidden size.
Rows of our query-key-value weight are all queries, all keys, all values: [(N + 2K) D, H].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config import ModelConfig


@dataclass(frozen=True)
class Reordering:
    """A way to store one parameter.

    Attributes:
        name: for messages and tests.
        tensors: number of their tensors.
        to_hf: our whole parameter to their tensors.
        from_hf: their tensors, in order, to our parameter; the exact inverse.
    """

    name: str
    tensors: int
    to_hf: Callable[[Tensor, ModelConfig], Sequence[Tensor]]
    from_hf: Callable[[Sequence[Tensor], ModelConfig], Tensor]


def _heads(model: ModelConfig) -> tuple[int, int, int]:
    return (
        model.attention.num_attention_heads,
        model.attention.num_query_groups,
        model.attention.kv_channels,
    )


def _qkv_rows(model: ModelConfig) -> list[int]:
    queries, groups, width = _heads(model)
    return [queries * width, groups * width, groups * width]


def _to_grouped(values: Tensor, model: ModelConfig) -> Sequence[Tensor]:
    queries, groups, width = _heads(model)
    q, k, v = values.split(_qkv_rows(model))
    rest = values.shape[1:]
    shares = [
        q.reshape(groups, queries // groups, width, *rest),
        k.reshape(groups, 1, width, *rest),
        v.reshape(groups, 1, width, *rest),
    ]
    return (torch.cat(shares, dim=1).reshape(values.shape),)


def _from_grouped(tensors: Sequence[Tensor], model: ModelConfig) -> Tensor:
    queries, groups, width = _heads(model)
    (values,) = tensors
    each = queries // groups
    shares = values.reshape(groups, each + 2, width, *values.shape[1:])
    parts = (shares[:, :each], shares[:, each : each + 1], shares[:, each + 1 :])
    return torch.cat([part.flatten(0, 2) for part in parts])


def _to_gate_and_up(values: Tensor, model: ModelConfig) -> Sequence[Tensor]:
    return values.chunk(2)


def _from_rows(tensors: Sequence[Tensor], model: ModelConfig) -> Tensor:
    return torch.cat(list(tensors))


SAME = Reordering("as it is", 1, lambda values, _: (values,), lambda tensors, _: tensors[0])
"""One tensor, in our order."""

TRANSPOSED = Reordering(
    "transposed", 1, lambda values, _: (values.T,), lambda tensors, _: tensors[0].T
)
"""The matrix as [inputs, outputs] (GPT-2's Conv1D)."""

SEPARATE_QKV = Reordering(
    "separate q, k, v", 3, lambda values, model: values.split(_qkv_rows(model)), _from_rows
)
"""Queries, keys and values are tensors of their own."""

GATE_AND_UP = Reordering("separate gate, up", 2, _to_gate_and_up, _from_rows)
"""Gate and up projection, [2F, H] here, are tensors of their own."""

GROUPED_QKV = Reordering("q, k, v by group", 1, _to_grouped, _from_grouped)
"""Each key and value head lies behind the queries that share it: [K, N/K + 2, D, H]. Where nothing
is shared that is [N, 3, D, H], the order of Megatron, GPT-NeoX and BLOOM."""
