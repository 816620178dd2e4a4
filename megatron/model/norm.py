"""Normalisation over the last dimension: hidden states [B, S, H], or heads [B, S, N, D]."""

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
    """A norm with a weight, which starts at 1 - ``offset``, and a bias, where the class has them.
    With ``heads`` it normalises a rank's heads, inside the cut layers.

    Attributes:
        narrows: whether the result has the dtype of the weight, not that of the input.
    """

    biased = False
    weighted = True
    narrows = False

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
        start, summed = Init(constant=1.0 - offset), heads or tp.split
        shard, at = Shard((width,)), tp.coordinates
        self.weight = parameter(shard, start, at, summed) if self.weighted else None
        self.bias = parameter(shard, Init(), at, summed) if self.biased else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to the same shape; to the same dtype unless it ``narrows``."""
        if self.weight is None:
            return self.normalise(x, None, None).to(x.dtype)
        dtype = self.weight.dtype if self.narrows else x.dtype
        weight, *biases = self.share(*(p for p in self._parameters.values() if p is not None))
        if self.offset:
            # In 16 bits the offset would swallow a much smaller weight.
            weight = self.offset + weight.to(torch.promote_types(weight.dtype, torch.float32))
        kind = torch.promote_types(x.dtype, weight.dtype)
        bias = biases[0].to(kind) if biases else None
        return self.normalise(x.to(kind), weight.to(kind), bias).to(dtype)

    @abstractmethod
    def normalise(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The formula, with all tensors of one dtype."""


class LayerNorm(Norm):
    """(x - mean) / sqrt(variance + epsilon) * weight + bias."""

    biased = True

    def normalise(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.layer_norm(x, (self.width,), weight, bias, self.epsilon)


class UnbiasedLayerNorm(LayerNorm):
    """(x - mean) / sqrt(variance + epsilon) * weight."""

    biased = False


class PlainLayerNorm(UnbiasedLayerNorm):
    """(x - mean) / sqrt(variance + epsilon)."""

    weighted = False


class RMSNorm(Norm):
    """x / sqrt(mean(x^2) + epsilon) * weight."""

    def normalise(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        on_cpu = x.device.type == "cpu" and not torch.compiler.is_compiling()
        if on_cpu and weight is not None:
            return rms_norm(x, weight, self.epsilon)
        return F.rms_norm(x, (self.width,), weight, self.epsilon)


class PlainRMSNorm(RMSNorm):
    """x / sqrt(mean(x^2) + epsilon)."""

    weighted = False


class AllHeadsNorm(RMSNorm):
    """:class:`RMSNorm` of ``heads`` heads together, [B, S, N, D], of which a rank has N; where
    there are fewer than ranks, neighbouring ranks have the same one. A rank has all weights."""

    def __init__(
        self, heads: int, head_dim: int, epsilon: float, tp: TensorParallel, offset: float
    ) -> None:
        super().__init__(heads * head_dim, epsilon, tp, offset, heads=True)
        self.group, self.copies = tp.group, max(1, tp.group.size // heads)

    @classmethod
    def of(
        cls, config: ModelConfig, heads: int, tp: TensorParallel, width: int | None = None
    ) -> AllHeadsNorm:
        """Return the norm of this many heads of a model, by default as wide as attention's."""
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
    """A norm of each head of [B, S, N, D] by itself, with a weight [heads, D] and no bias, of which
    a rank uses those of its N heads. ``centred``: layer norm instead of RMS norm."""

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


_NORMS: dict[str, type[Norm]] = {
    cls.__name__: cls
    for cls in (LayerNorm, RMSNorm, UnbiasedLayerNorm, PlainLayerNorm, PlainRMSNorm)
}


def build_norm(config: ModelConfig, tp: TensorParallel, heads: bool = False) -> Norm:
    """The norm that ``--normalization`` names, for hidden states; with ``heads`` for each head by
    itself, with one weight [D] for all heads."""
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
    """The norm that ``--normalization`` names, of vectors of a width; ``epsilon`` by default
    ``--norm-epsilon``."""
    norm = config.norm
    offset, epsilon = float(norm.apply_layernorm_1p), epsilon or norm.norm_epsilon
    return _NORMS[norm.normalization](width, epsilon, tp, offset, heads)


def build_qk_norm(config: ModelConfig, tp: TensorParallel, heads: int) -> Norm:
    """Return the norm of queries or keys with this many heads."""
    norm = config.norm
    if norm.qk_layernorm_per_head:
        width, centred = config.attention.kv_channels, norm.traits.statistics > 1
        return EachHeadNorm(heads, width, norm.norm_epsilon, tp, centred)
    if norm.qk_layernorm_whole:
        return AllHeadsNorm.of(config, heads, tp)
    return build_norm(config, tp, heads=True)


def l2_norm(x_BSND: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) over each head, computed in float32 or better."""
    kind = torch.promote_types(x_BSND.dtype, torch.float32)
    x = x_BSND.to(kind)
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)).to(x_BSND.dtype)


class FinalNorm(nn.Module):
    """The norm before the head."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.norm = build_norm(config, tp)

    def forward(self, state: LayerState) -> LayerState:
        """Hidden states [B, S, H] to [B, S, H]."""
        return state.with_hidden(self.norm(state.hidden))
