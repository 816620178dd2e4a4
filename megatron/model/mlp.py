"""The MLP of a block."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.shard import initial
from megatron.parallel.tensor_parallel import TensorParallel


def _gelu_tanh(x: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    # 1 + tanh(u) = 2 sigmoid(2u), which compiles to a third of the instructions.
    z = x.to(torch.promote_types(x.dtype, torch.float32))
    return (z * torch.sigmoid(z * (_TWICE * (1.0 + 0.044715 * z * z)))).to(x.dtype)


_TWICE = 2 * math.sqrt(2 / math.pi)


def _swiglu(x_BSF: Tensor) -> Tensor:
    gate, up = x_BSF.chunk(2, dim=-1)
    return F.silu(gate) * up


def _geglu(x_BSF: Tensor) -> Tensor:
    gate, up = x_BSF.chunk(2, dim=-1)
    return _gelu_tanh(gate) * up


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": _gelu_tanh,
    "gelu_erf": F.gelu,
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
    "swiglu": _swiglu,
    "geglu": _geglu,
}
"""By the names of :class:`MLPConfig`; gates halve the last dimension."""


class MLP(nn.Module):
    """Up, activation, down; the inner width is cut over ranks. A gate and the up projection are one
    GEMM, gate first."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        mlp, inner = config.mlp, config.mlp.ffn_hidden_size
        self.activation = ACTIVATIONS[mlp.activation]
        self.up = ColumnParallelLinear(
            config.hidden_size,
            (inner, inner) if mlp.gated else (inner,),
            bias=mlp.bias,
            init=initial(config),
            tp=tp,
        )
        self.down = RowParallelLinear(
            inner,
            config.hidden_size,
            bias=mlp.bias,
            init=initial(config, scaled=True),
            tp=tp,
        )

    def forward(self, x_BSH: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x_BSH)))
