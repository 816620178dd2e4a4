"""Activation functions of MLPs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.blocks import MLPConfig
from megatron.kernels.swiglu import GATES, gated, gelu_tanh
from megatron.kernels.switches import uses
from megatron.parallel.shard import Init, Shard, parameter
from megatron.parallel.tensor_parallel import TensorParallel


class XIELU(nn.Module):
    """xIELU (Huang and Schlag 2024, arXiv:2411.13010): p x^2 + x/2 for x > 0, else n (expm1(x) - x)
    + x/2. The learned p = softplus(alpha_p) and n = 1/2 + softplus(alpha_n) start at 0.8."""

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self.share = tp.over_heads
        for name, value in (("alpha_p", 0.8), ("alpha_n", 0.3)):
            start = Init(constant=math.log(math.expm1(value)))
            setattr(self, name, parameter(Shard((1,)), start, tp.coordinates, summed=True))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., F / tensor size] to the same shape."""
        p, n = (F.softplus(alpha.to(x.dtype)) for alpha in self.share(*self.parameters()))
        # As in the original code, the clamp keeps the branch that where() discards from
        # overflowing.
        below = (torch.expm1(x.clamp(max=-1e-6)) - x) * (0.5 + n)
        return torch.where(x > 0, p * x * x, below) + 0.5 * x


def _gated(x_BSF: Tensor, kind: str, clamp: float | None, offset: float) -> Tensor:
    if uses("swiglu", x_BSF):
        return gated(x_BSF, kind, clamp, offset)
    gate, up = x_BSF.chunk(2, dim=-1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return GATES[kind](gate) * (up + offset if offset else up)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": gelu_tanh,
    "gelu_erf": F.gelu,
    "relu": F.relu,
    "squared_relu": GATES["squared_reglu"],
}
"""Activations without a gate, by :attr:`MLPConfig.activation`."""


@cache
def activation_of(mlp: MLPConfig) -> Callable[[Tensor], Tensor]:
    """Return the function between an MLP's two projections. A gated one expects the gate and up
    projections concatenated along the last dimension, gate first, and halves the width. Equal MLPs
    share one function object, so that code compiled for one block serves all of them."""
    if not mlp.gated:
        return ACTIVATIONS[mlp.activation]
    return partial(
        _gated,
        kind=mlp.activation,
        clamp=mlp.activation_func_clamp_value,
        offset=mlp.glu_linear_offset,
    )
