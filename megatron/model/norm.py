"""Norms over the last dimension of hidden states [B, S, H] or heads [B, S, N, D]."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.kernels.cpu_kernels import rms_norm
from megatron.model.layer_list import LayerState
from megatron.parallel.shard import Init, Shard, parameter
from megatron.parallel.tensor_parallel import TensorParallel, sum_over_ranks


class Norm(nn.Module, ABC):
    """Base class of norms. The weight, if ``weighted``, starts at 1 - ``offset``; a bias is added
    if ``biased``. With ``heads`` the norm applies to a rank's heads, inside tensor-parallel layers.

    Attributes:
        narrows: whether the output has the weight's dtype instead of the input's.
    """

    narrows = False

    def __init__(
        self,
        width: int,
        epsilon: float,
        tp: TensorParallel,
        offset: float = 0.0,
        heads: bool = False,
        biased: bool = False,
        weighted: bool = True,
    ) -> None:
        super().__init__()
        self.width, self.epsilon, self.offset = width, epsilon, offset
        self.share = tp.over_heads if heads else tp.shared
        start, summed = Init(constant=1.0 - offset), heads or tp.split
        shard, at = Shard((width,)), tp.coordinates
        self.weight = parameter(shard, start, at, summed) if weighted else None
        self.bias = parameter(shard, Init(), at, summed) if biased else None

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., width] to the same shape, and to the same dtype unless the norm ``narrows``."""
        if self.weight is None:
            return self.normalise(x, None, None).to(x.dtype)
        dtype = self.weight.dtype if self.narrows else x.dtype
        weight, *biases = self.share(*(p for p in self._parameters.values() if p is not None))
        if self.offset:
            # In 16 bits, adding the offset would round away a much smaller weight.
            weight = self.offset + weight.to(torch.promote_types(weight.dtype, torch.float32))
        kind = torch.promote_types(x.dtype, weight.dtype)
        bias = biases[0].to(kind) if biases else None
        return self.normalise(x.to(kind), weight.to(kind), bias).to(dtype)

    @abstractmethod
    def normalise(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Apply the norm's formula to tensors that all have the same dtype."""


class LayerNorm(Norm):
    """Layer norm: (x - mean) / sqrt(variance + epsilon) * weight + bias."""

    def normalise(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.layer_norm(x, (self.width,), weight, bias, self.epsilon)


class RMSNorm(Norm):
    """RMS norm: x / sqrt(mean(x^2) + epsilon) * weight."""

    def normalise(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        on_cpu = x.device.type == "cpu" and not torch.compiler.is_compiling()
        if on_cpu and weight is not None:
            return rms_norm(x, weight, self.epsilon)
        return F.rms_norm(x, (self.width,), weight, self.epsilon)


class AllHeadsNorm(RMSNorm):
    """:class:`RMSNorm` over all ``heads`` heads together, of which a rank has N: [B, S, N, D]. If
    there are fewer heads than ranks, neighbouring ranks share a head. The weight is replicated."""

    def __init__(
        self, heads: int, head_dim: int, epsilon: float, tp: TensorParallel, offset: float
    ) -> None:
        super().__init__(heads * head_dim, epsilon, tp, offset, heads=True)
        self.group, self.copies = tp.group, max(1, tp.group.size // heads)

    @classmethod
    def of(
        cls, config: ModelConfig, heads: int, tp: TensorParallel, width: int | None = None
    ) -> AllHeadsNorm:
        """Return the norm over ``heads`` heads of ``width`` channels (default: attention's)."""
        norm, width = config.norm, width or config.attention.kv_channels
        return cls(heads, width, norm.norm_epsilon, tp, float(norm.apply_layernorm_1p))

    def normalise(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        assert weight is not None
        x_BSX = x.flatten(2)
        if self.group.size == 1:
            return super().normalise(x_BSX, weight, bias).view_as(x)
        width = x_BSX.shape[-1]
        weight = weight.narrow(0, self.group.rank // self.copies * width, width)
        x_BSX = x_BSX.to(torch.promote_types(x.dtype, torch.float32))
        squares_BS1 = x_BSX.square().sum(-1, keepdim=True) / self.copies
        mean_BS1 = sum_over_ranks(squares_BS1, self.group) / self.width
        scaled = x_BSX * torch.rsqrt(mean_BS1 + self.epsilon)
        return (scaled.to(x.dtype) * weight).view_as(x)


class EachHeadNorm(Norm):
    """Norm of each head of [B, S, N, D] separately, without a bias. Its weight is [heads, D], and a
    rank uses the rows for its N heads. ``centred`` selects layer norm instead of RMS norm."""

    def __init__(
        self, heads: int, head_dim: int, epsilon: float, tp: TensorParallel, centred: bool
    ) -> None:
        super().__init__(head_dim, epsilon, tp, heads=True)
        self.group, self.copies, self.centred = tp.group, max(1, tp.group.size // heads), centred
        start = Init(constant=1.0)
        self.weight = parameter(Shard((heads, head_dim)), start, tp.coordinates, summed=True)

    def normalise(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        assert weight is not None
        heads = x.shape[2]
        weight = weight.narrow(0, self.group.rank // self.copies * heads, heads)
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        formula = F.layer_norm if self.centred else F.rms_norm
        return formula(x, (self.width,), eps=self.epsilon) * weight


def build_norm(config: ModelConfig, tp: TensorParallel, heads: bool = False) -> Norm:
    """Return the norm selected by ``--normalization`` for hidden states, or with ``heads`` for each
    head separately, with one weight [D] for all heads."""
    width = config.attention.kv_channels if heads else config.hidden_size
    built = norm_of(config, width, tp, heads=heads)
    built.narrows = config.fp32_residual_connection and not heads
    return built


def norm_of(
    config: ModelConfig,
    width: int,
    tp: TensorParallel,
    epsilon: float | None = None,
    heads: bool = False,
) -> Norm:
    """Return the norm selected by ``--normalization`` over a last dimension of ``width`` channels.
    ``epsilon`` defaults to ``--norm-epsilon``."""
    norm, traits = config.norm, config.norm.traits
    offset, epsilon = float(norm.apply_layernorm_1p), epsilon or norm.norm_epsilon
    cls = LayerNorm if traits.centred else RMSNorm
    return cls(width, epsilon, tp, offset, heads, traits.biased, traits.weighted)


def build_qk_norm(config: ModelConfig, tp: TensorParallel, heads: int) -> Norm:
    """Return the norm that the flags select for queries or keys with ``heads`` heads."""
    norm = config.norm
    if norm.qk_layernorm_per_head:
        width = config.attention.kv_channels
        return EachHeadNorm(heads, width, norm.norm_epsilon, tp, norm.traits.centred)
    if norm.qk_layernorm_whole:
        return AllHeadsNorm.of(config, heads, tp)
    return build_norm(config, tp, heads=True)


def l2_norm(x_BSND: Tensor, epsilon: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + epsilon) per head, computed in float32 or better."""
    kind = torch.promote_types(x_BSND.dtype, torch.float32)
    x = x_BSND.to(kind)
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)).to(x_BSND.dtype)


class FinalNorm(nn.Module):
    """Norm before the output head."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.norm = build_norm(config, tp)

    def forward(self, state: LayerState) -> LayerState:
        """Normalise hidden states [B, S, H]."""
        return state.with_hidden(self.norm(state.hidden))
