"""Normalisation layers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.parallel.shard import Init, Shard, parameter


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + epsilon) * weight + bias over the last dimension."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = parameter(Shard((width,)), Init(constant=1.0), 1)
        self.bias = parameter(Shard((width,)), Init(), 1)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """[B, S, H] to [B, S, H]."""
        return F.layer_norm(x_BSH, self.weight.shape, self.weight, self.bias, self.epsilon)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = parameter(Shard((width,)), Init(constant=1.0), 1)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """[B, S, H] to [B, S, H]."""
        return F.rms_norm(x_BSH, self.weight.shape, self.weight, self.epsilon)


def build_norm(config: ModelConfig) -> nn.Module:
    """The norm that ``--normalization`` names."""
    norm = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}[config.normalization]
    assert config.hidden_size is not None
    return norm(config.hidden_size, config.norm_epsilon)
