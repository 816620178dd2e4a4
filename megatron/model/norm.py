"""Normalisation layers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.model.layer_list import Stream
from megatron.parallel.region import TensorParallel
from megatron.parallel.shard import Init, Shard, parameter


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + epsilon) * weight + bias over the last dimension."""

    def __init__(self, width: int, epsilon: float, region: TensorParallel) -> None:
        super().__init__()
        self.epsilon, self.region = epsilon, region
        self.weight = parameter(Shard((width,)), Init(constant=1.0), region.group)
        self.bias = parameter(Shard((width,)), Init(), region.group)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """[B, S, H] to [B, S, H]."""
        weight, bias = self.region.shared(self.weight, self.bias)
        return F.layer_norm(x_BSH, weight.shape, weight, bias, self.epsilon)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension."""

    def __init__(self, width: int, epsilon: float, region: TensorParallel) -> None:
        super().__init__()
        self.epsilon, self.region = epsilon, region
        self.weight = parameter(Shard((width,)), Init(constant=1.0), region.group)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """[B, S, H] to [B, S, H]."""
        (weight,) = self.region.shared(self.weight)
        return F.rms_norm(x_BSH, weight.shape, weight, self.epsilon)


def build_norm(config: ModelConfig, region: TensorParallel) -> nn.Module:
    """The norm that ``--normalization`` names."""
    norm = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}[config.normalization]
    assert config.hidden_size is not None
    return norm(config.hidden_size, config.norm_epsilon, region)


class FinalNorm(nn.Module):
    """The norm in front of the head."""

    def __init__(self, config: ModelConfig, region: TensorParallel) -> None:
        super().__init__()
        self.norm = build_norm(config, region)

    def forward(self, stream: Stream) -> Stream:
        """Hidden states [B, S, H] to [B, S, H]."""
        return stream.with_hidden(self.norm(stream.hidden))
