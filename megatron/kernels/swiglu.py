"""Gated activations of MLPs, activation(gate) * up, in one pass over memory in each direction.

The kinds are those of ``MLPConfig``: ``swiglu`` (Shazeer 2020, arXiv:2002.05202), ``geglu`` (with
tanh), ``geglu_erf``, ``quick_geglu`` and ``squared_reglu``. A ``clamp`` c limits ``gate`` to at
most c and ``up`` to [-c, c]. Then ``offset`` is added to ``up``. Everything is computed in float32
(float64 for float64 tensors) and rounded once.

Shapes: T tokens, F twice the inner width (gate, then up), or the inner width of a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.operators import define

_QUICK, _TWICE = 1.702, 2 * math.sqrt(2 / math.pi)


def gelu_tanh(x: Tensor) -> Tensor:
    """Compute the tanh approximation of GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    # Use 1 + tanh(u) = 2 sigmoid(2u), which compiles to a third of the instructions.
    z = x.to(torch.promote_types(x.dtype, torch.float32))
    return (z * torch.sigmoid(z * (_TWICE * (1.0 + 0.044715 * z * z)))).to(x.dtype)


def _quick_gelu(x: Tensor) -> Tensor:
    """Compute the sigmoid approximation of GELU (from the paper of GELU)."""
    return x * torch.sigmoid(_QUICK * x)


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": gelu_tanh,
    "geglu_erf": F.gelu,
    "quick_geglu": _quick_gelu,
    "squared_reglu": _squared_relu,
}
"""Activation of the gate for each kind."""


def gated(x: Tensor, kind: str, clamp: float | None, offset: float) -> Tensor:
    """Apply the gated activation to [..., 2F], and return [..., F]."""
    y_TF, _ = swiglu(_rows(x), kind, clamp, offset, False)
    return y_TF.view(*x.shape[:-1], x.shape[-1] // 2)  # type: ignore[no-any-return]


def _rows(x: Tensor) -> Tensor:
    """Flatten to a matrix whose last dimension is contiguous."""
    x_TF = x.flatten(0, -2) if x.dim() != 2 else x
    return x_TF if x_TF.stride(1) == 1 else x_TF.contiguous()


def _halves(
    x_TF: Tensor, clamp: float | None, offset: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gate and up, raw and after clamping and offset, in the dtype of computation."""
    gate, up = x_TF.to(torch.promote_types(x_TF.dtype, torch.float32)).chunk(2, -1)
    if clamp is None:
        return gate, up, gate, up + offset if offset else up
    bounded = up.clamp(-clamp, clamp)
    return gate, up, gate.clamp(max=clamp), bounded + offset if offset else bounded


def _formula(
    x_TF: Tensor, kind: str, clamp: float | None, offset: float, largest: bool
) -> tuple[Tensor, Tensor]:
    _, _, gate, up = _halves(x_TF, clamp, offset)
    y = (GATES[kind](gate) * up).to(x_TF.dtype)
    return y, _magnitude(y, largest)


def _backward_formula(
    x_TF: Tensor,
    grad_TF: Tensor,
    kind: str,
    clamp: float | None,
    offset: float,
    largest: bool,
) -> tuple[Tensor, Tensor]:
    raw_gate, raw_up, gate, up = _halves(x_TF, clamp, offset)
    grad = grad_TF.to(gate.dtype)
    gate_grad, up_grad = _through(grad * up, gate, kind), grad * GATES[kind](gate)
    if clamp is not None:
        gate_grad = torch.where(raw_gate <= clamp, gate_grad, 0.0)
        up_grad = torch.where((raw_up >= -clamp) & (raw_up <= clamp), up_grad, 0.0)
    result = torch.cat([gate_grad, up_grad], -1).to(x_TF.dtype)
    return result, _magnitude(result, largest)


def _through(grad: Tensor, gate: Tensor, kind: str) -> Tensor:
    """Multiply a gradient by the derivative of the gate's activation."""
    if kind == "swiglu":
        return torch.ops.aten.silu_backward(grad, gate)
    if kind == "quick_geglu":
        sigmoid = torch.sigmoid(_QUICK * gate)
        return grad * sigmoid + grad * gate * (1.0 - sigmoid) * sigmoid * _QUICK
    if kind == "squared_reglu":
        return grad * (2.0 * F.relu(gate))
    approximate = "tanh" if kind == "geglu" else "none"
    return torch.ops.aten.gelu_backward(grad, gate, approximate=approximate)


def _magnitude(y: Tensor, largest: bool) -> Tensor:
    if not largest:
        return y.new_empty(0, dtype=torch.float32)
    return y.abs().amax().to(torch.float32).view(1) if y.numel() else y.new_zeros(1).float()


def _kernel(*args: Any) -> tuple[Tensor, Tensor]:
    from megatron.kernels import swiglu_triton

    return swiglu_triton.forward(*args)


def _backward_kernel(x_TF: Tensor, grad_TF: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    from megatron.kernels import swiglu_triton

    return swiglu_triton.backward(x_TF, grad_TF.contiguous(), *options)


def _shapes(
    x_TF: Tensor, kind: str, clamp: float | None, offset: float, largest: bool
) -> tuple[Tensor, Tensor]:
    y = x_TF.new_empty(x_TF.shape[0], x_TF.shape[1] // 2)
    return y, x_TF.new_empty(int(largest), dtype=torch.float32)


def _backward_shapes(
    x_TF: Tensor,
    grad_TF: Tensor,
    kind: str,
    clamp: float | None,
    offset: float,
    largest: bool,
) -> tuple[Tensor, Tensor]:
    return x_TF.new_empty(x_TF.shape), x_TF.new_empty(int(largest), dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x_TF, *ctx.options, _ = inputs
    ctx.save_for_backward(x_TF)


def _backward(ctx: Any, grad_TF: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    (x_TF,) = ctx.saved_tensors
    result, _ = swiglu_backward(x_TF, grad_TF, *ctx.options, False)
    return result, None, None, None, None


swiglu_backward = define(
    "swiglu_backward(Tensor x, Tensor grad, str kind, float? clamp, float offset, bool largest) "
    "-> (Tensor, Tensor)",
    _backward_formula,
    _backward_shapes,
    _backward_kernel,
)
"""Operator that computes the gradient [T, 2F] of gate and up, given gate, up and the result's
gradient [T, F]. It also returns the new gradient's amax, float32 [1] with ``largest``, else
empty."""

swiglu = define(
    "swiglu(Tensor x, str kind, float? clamp, float offset, bool largest) -> (Tensor, Tensor)",
    _formula,
    _shapes,
    _kernel,
    save=_save,
    backward=_backward,
)
"""Operator that computes the gated activation [T, F] of gate and up [T, 2F]. It also returns the
activation's amax without a gradient, float32 [1] with ``largest``, else empty."""
