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
    """xIELU (Huang and Schlag 2024, arXiv:2411.13010): p x^2 + x/2 for x > 0, else
    n (expm1(x) - x) + x/2, where p = softplus(alpha_p) and n = 1/2 + softplus(alpha_n) are learned
    in each block, from 0.8 on."""

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self.share = tp.over_heads
        for name, value in (("alpha_p", 0.8), ("alpha_n", 0.3)):
            start = Init(constant=math.log(math.expm1(value)))
            setattr(self, name, parameter(Shard((1,)), start, tp.coordinates, summed=True))

    def forward(self, x: Tensor) -> Tensor:
        """[..., F / tensor size] to the same shape."""
        p, n = (F.softplus(alpha.to(x.dtype)) for alpha in self.share(*self.parameters()))
        # The bound keeps the unused branch from overflowing; it is the original code's.
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
"""Activations without a gate, by the names of :class:`MLPConfig`."""


@cache
def activation_of(mlp: MLPConfig) -> Callable[[Tensor], Tensor]:
    """The function between the two projections of an MLP; with a gate, which is the first half of
    the last dimension, it halves that dimension. One object for equal MLPs: code compiled for a
    block then serves all blocks with it."""
    if not mlp.gated:
        return ACTIVATIONS[mlp.activation]
    return partial(
        _gated,
        kind=mlp.activation,
        clamp=mlp.activation_func_clamp_value,
        offset=mlp.glu_linear_offset,
    )
