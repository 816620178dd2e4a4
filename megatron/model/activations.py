"""Activation functions of MLPs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.blocks import MLPConfig


def _gelu_tanh(x: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    # 1 + tanh(u) = 2 sigmoid(2u), which compiles to a third of the instructions.
    z = x.to(torch.promote_types(x.dtype, torch.float32))
    return (z * torch.sigmoid(z * (_TWICE * (1.0 + 0.044715 * z * z)))).to(x.dtype)


_TWICE = 2 * math.sqrt(2 / math.pi)


def _quick_gelu(x: Tensor) -> Tensor:
    """Approximates GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2)."""
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _gated(
    x_BSF: Tensor,
    activation: Callable[[Tensor], Tensor],
    clamp: float | None = None,
    offset: float = 0.0,
) -> Tensor:
    gate, up = x_BSF.chunk(2, dim=-1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return activation(gate) * (up + offset if offset else up)


_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": _gelu_tanh,
    "geglu_erf": F.gelu,
    "quick_geglu": _quick_gelu,
    "squared_reglu": _squared_relu,
}

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": _gelu_tanh,
    "gelu_erf": F.gelu,
    "relu": F.relu,
    "squared_relu": _squared_relu,
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
        activation=_GATES[mlp.activation],
        clamp=mlp.activation_func_clamp_value,
        offset=mlp.glu_linear_offset,
    )
