"""Attention with separate heads for each block, and a scalar that multiplies a block's output.

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
from megatron.parallel.layers import ColumnParallelLinear
from megatron.parallel.shard import Buffer, initial
from megatron.parallel.tensor_parallel import TensorParallel


class KeysAsValues(nn.Module):
    """Projection to queries and keys that also returns the keys as values."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        attention = model.attention
        groups = attention.num_query_groups
        layer = partial(
            ColumnParallelLinear,
            model.hidden_size,
            bias=attention.qkv_bias,
            init=initial(model),
            tp=tp,
        )
        self.q = layer((attention.query_rows,))
        self.k = layer((groups * attention.kv_channels,), heads=groups)

    def forward(self, x_BSI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project [B, S, I] to this rank's queries, keys and values, with heads concatenated. With
        --attention-output-gate each query is followed by its gate."""
        k_BSK = self.k(x_BSI)
        return self.q(x_BSI), k_BSK, k_BSK


class GlobalHeadsAttention(Attention):
    """Attention with the head size and number of its own block."""

    def __init__(
        self, config: ModelConfig, layer: int, tp: TensorParallel, recompute: bool
    ) -> None:
        model = of_block(config, layer)
        super().__init__(model, layer, tp, recompute)
        normalises = config.part(GlobalHeadsConfig).value_norm
        self.value_epsilon = config.norm.norm_epsilon if normalises else None
        # values change after the projection, so that no packed kernel can be used
        self.packed = None
        if keys_are_values(config, layer):
            self.qkv = KeysAsValues(model, tp)  # type: ignore[assignment]

    def _bounded(self, heads: Tensor, norm: nn.Module | None = None) -> Tensor:
        """Normalise queries or keys by ``norm``. Values, for which it is None, are divided by their
        root mean square if the model normalises values."""
        if norm is None and self.value_epsilon is not None:
            heads = l2_norm(heads, self.value_epsilon)
        return super()._bounded(heads, norm)


class BlockScalar(Buffer):
    """Scalar that multiplies a block's output. It is 1 unless a checkpoint stores another value."""

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
    """Return the model specification with a scalar that multiplies each block's output."""

    def scaled(layer: LayerSpec) -> LayerSpec:
        if not layer.block:
            return layer
        return replace(layer, build=partial(_built, layer.build), forward=_multiplied)

    return replace(spec, layers=lambda tp: [scaled(layer) for layer in spec.layers(tp)])
