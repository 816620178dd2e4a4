"""Normalisation over the last dimension: hidden states [B, S, H], or heads [B, S, N, D]."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import ModelConfig, NormConfig
from megatron.model.rms_norm import rms_norm
from megatron.model.state import LayerState
from megatron.parallel.shard import Init, Shard, parameter
from megatron.parallel.tensor_parallel import TensorParallel


class Norm(nn.Module, ABC):
    """What both norms have in common.

    Args:
        width: of the last dimension.
        epsilon: added to the variance.
        region: the tensor-parallel ranks.
        offset: added to the weight, which starts at 1 - offset.
        heads: whether it is for a rank's heads instead of what lies between the cut layers.
    """

    biased = False

    def __init__(
        self,
        width: int,
        epsilon: float,
        tp: TensorParallel,
        offset: float = 0.0,
        heads: bool = False,
    ) -> None:
        super().__init__()
        self.width, self.epsilon, self.offset = width, epsilon, offset
        self.share = tp.over_heads if heads else tp.shared
        self.weight = parameter(Shard((width,)), Init(constant=1.0 - offset), tp.coordinates)
        self.bias = parameter(Shard((width,)), Init(), tp.coordinates) if self.biased else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to the same shape and number format."""
        weight, *biases = self.share(*self.parameters())
        if self.offset:
            # In 16 bits a weight that is much smaller than the offset would be lost in the sum.
            weight = self.offset + weight.to(torch.promote_types(weight.dtype, torch.float32))
        kind = torch.promote_types(x.dtype, weight.dtype)
        bias = biases[0].to(kind) if biases else None
        return self.normalise(x.to(kind), weight.to(kind), bias).to(x.dtype)

    @abstractmethod
    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The formula, all in one number format."""


class LayerNorm(Norm):
    """(x - mean) / sqrt(variance + epsilon) * weight + bias."""

    biased = True

    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See :meth:`Norm.normalise`."""
        return F.layer_norm(x, (self.width,), weight, bias, self.epsilon)


class RMSNorm(Norm):
    """x / sqrt(mean(x^2) + epsilon) * weight."""

    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See :meth:`Norm.normalise`."""
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            return rms_norm(x, weight, self.epsilon)
        return F.rms_norm(x, (self.width,), weight, self.epsilon)


_NORMS: dict[str, type[Norm]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


def build_norm(config: ModelConfig, tp: TensorParallel) -> Norm:
    """The norm that ``--normalization`` names, of hidden states."""
    return _norm(config.norm, config.hidden_size, tp, False)


def build_head_norm(config: ModelConfig, tp: TensorParallel) -> Norm:
    """The same norm of each head by itself; one weight [D] for all of them."""
    return _norm(config.norm, config.attention.kv_channels, tp, True)


def _norm(norm: NormConfig, width: int, tp: TensorParallel, of_head: bool) -> Norm:
    offset = float(norm.apply_layernorm_1p)
    return _NORMS[norm.normalization](width, norm.norm_epsilon, tp, offset, of_head)


class FinalNorm(nn.Module):
    """The norm in front of the head."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.norm = build_norm(config, tp)

    def forward(self, state: LayerState) -> LayerState:
        """Hidden states [B, S, H] to [B, S, H]."""
        return state.with_hidden(self.norm(state.hidden))
