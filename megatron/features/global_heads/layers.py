"""Attention with the heads of its block, and the number that multiplies the output of a block.

Shapes: B batch, S sequence, I and H hidden size, N heads, K key heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.features.global_heads.flags import GlobalHeadsConfig, keys_are_values, of_block
from megatron.model.attention import Attention
from megatron.model.layer_list import LayerSpec, LayerState
from megatron.model.norm import l2_norm
from megatron.model.spec import ModelSpec
from megatron.parallel.layers import ColumnParallelLinear, ParallelLinear
from megatron.parallel.linear import LinearMap, column_linear
from megatron.parallel.shard import Buffer, Cut, initial
from megatron.parallel.tensor_parallel import TensorParallel


class KeyParallelLinear(ParallelLinear):
    """Keys alone, ``heads`` cut over ranks; with fewer heads than ranks each is held by several
    neighbouring ranks."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__(tp)
        attention = model.attention
        self.copies = max(1, tp.group.size // attention.num_query_groups)
        rows = attention.num_query_groups * attention.kv_channels
        cut = Cut(0, parts=(rows,), copies=self.copies)
        self.weight, self.bias = self._parameters_of(
            rows, model.hidden_size, cut, attention.qkv_bias, initial(model)
        )

    def forward(self, x_BSI: Tensor) -> Tensor:
        """[B, S, I] to this rank's keys of the whole sequence, heads side by side."""
        whole = LinearMap(self.weight, self.bias, self.copies, self.kernel, self.weight_kept)
        if self.adapters is not None:
            (k_BSK,) = self.adapters.outputs(self, x_BSI, (whole,))
        else:
            (k_BSK,) = column_linear(x_BSI, (whole,), self.tp)
        return k_BSK


class KeysAsValues(nn.Module):
    """Queries, keys, and the keys again as values."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        attention = model.attention
        self.q = ColumnParallelLinear(
            model.hidden_size,
            (attention.num_attention_heads * attention.kv_channels,),
            bias=attention.qkv_bias,
            init=initial(model),
            tp=tp,
        )
        self.k = KeyParallelLinear(model, tp)

    def forward(self, x_BSI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S, I] to this rank's queries, keys and values, heads side by side."""
        k_BSK = self.k(x_BSI)
        return self.q(x_BSI), k_BSK, k_BSK


class GlobalHeadsAttention(Attention):
    """Attention with the heads of its block."""

    def __init__(
        self, config: ModelConfig, layer: int, tp: TensorParallel, recompute: bool
    ) -> None:
        model = of_block(config, layer)
        super().__init__(model, layer, tp, recompute)
        normalises = config.part(GlobalHeadsConfig).value_norm
        self.value_epsilon = config.norm.norm_epsilon if normalises else None
        self.packed = None  # values are not used as projected
        if keys_are_values(config, layer):
            self.qkv = KeysAsValues(model, tp)  # type: ignore[assignment]

    def _bounded(self, heads: Tensor, norm: nn.Module | None = None) -> Tensor:
        """Queries and keys have a norm; values, which have none, are divided by theirs."""
        if norm is None and self.value_epsilon is not None:
            heads = l2_norm(heads, self.value_epsilon)
        return super()._bounded(heads, norm)


class BlockScalar(Buffer):
    """The number that multiplies the output of a block, 1 until a checkpoint has another."""

    def __init__(self) -> None:
        super().__init__(1)
        self.values += 1

    def start(self, device: torch.device) -> None:
        super().start(device)
        self.values += 1


def _built(build: Callable[[], nn.Module]) -> nn.Module:
    block = build()
    block.scalar = BlockScalar()  # type: ignore[assignment]
    block.may_hand_on = False  # type: ignore[assignment]
    return block


def _multiplied(block: nn.Module, state: LayerState) -> LayerState:
    state, scalar = block(state), block.scalar
    assert isinstance(scalar, BlockScalar)
    return state.with_hidden(state.hidden * scalar.values.to(state.hidden))


def with_scalars(spec: ModelSpec) -> ModelSpec:
    """The model whose blocks multiply their outputs."""

    def scaled(layer: LayerSpec) -> LayerSpec:
        if not layer.block:
            return layer
        return replace(layer, build=partial(_built, layer.build), forward=_multiplied)

    return replace(spec, layers=lambda tp: [scaled(layer) for layer in spec.layers(tp)])
