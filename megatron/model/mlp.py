"""The MLP of a block."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.model.activations import activation_of
from megatron.model.norm import AllHeadsNorm
from megatron.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.shard import Init, Shard, initial, parameter
from megatron.parallel.tensor_parallel import TensorParallel


class XIELU(nn.Module):
    """xIELU (Huang and Schlag 2024, arXiv:2411.13010): p x^2 + x/2 for x > 0, else
    n (expm1(x) - x) + x/2, where p = softplus(alpha_p) and n = 1/2 + softplus(alpha_n) are learned
    in each block, from 0.8 on."""

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self.share = tp.over_heads
        for name, value in (("alpha_p", 0.8), ("alpha_n", 0.3)):
            start = Init(constant=math.log(math.expm1(value)))
            setattr(self, name, parameter(Shard((1,)), start, tp.coordinates))

    def forward(self, x: Tensor) -> Tensor:
        """[..., F / tensor size] to the same shape."""
        p, n = (F.softplus(alpha.to(x.dtype)) for alpha in self.share(*self.parameters()))
        # The bound keeps the unused branch from overflowing, and is that of the first code.
        below = (torch.expm1(x.clamp(max=-1e-6)) - x) * (0.5 + n)
        return torch.where(x > 0, p * x * x, below) + 0.5 * x


class MLP(nn.Module):
    """Up, activation, down; the inner width, by default that of the configuration, is cut over
    ranks. A gate and the up projection are one GEMM, gate first."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, inner: int | None = None) -> None:
        super().__init__()
        mlp, inner = config.mlp, inner or config.mlp.ffn_hidden_size
        self.activation = XIELU(tp) if mlp.activation == "xielu" else activation_of(mlp)
        self.up = ColumnParallelLinear(
            config.hidden_size,
            (inner, inner) if mlp.gated else (inner,),
            bias=mlp.bias,
            init=initial(config),
            tp=tp,
        )
        # Each of the inner channels is a head of its own.
        self.sub_norm = AllHeadsNorm.of(config, inner, tp, 1) if config.norm.sub_norm else None
        self.down = RowParallelLinear(
            inner,
            config.hidden_size,
            bias=mlp.bias,
            init=initial(config, scaled=True),
            tp=tp,
        )

    def forward(self, x_BSH: Tensor) -> Tensor:
        inner_BSF = self.activation(self.up(x_BSH))
        if self.sub_norm is not None:
            inner_BSF = self.sub_norm(inner_BSF.unsqueeze(-1)).squeeze(-1)
        return self.down(inner_BSF)
