"""Triton kernels of gated activations.

A program reads a block of columns of one row, from both gate and up, so that the sigmoid that both
gradients need is computed once. Rows are addressed with 64 bits and columns with 32, so that the
eight columns of a thread are one load of 16 bytes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels.magnitude_triton import magnitude_bits, raise_largest

BLOCK, WARPS = 1024, 4
"""Number of columns and of warps per program: eight columns per thread."""

QUICK = tl.constexpr(1.702)
CUBIC = tl.constexpr(0.044715)
TWICE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
ROOT_HALF = tl.constexpr(0.7071067811865476)
DENSITY = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi), the normal density at 0


@triton.jit
def activation(gate, KIND: tl.constexpr):
    """Return the gate's activation and derivative in float32. Unused results are compiled away."""
    if KIND == "squared_reglu":
        root = tl.maximum(gate, 0.0, tl.PropagateNan.ALL)
        value = root * root
        derivative = 2.0 * root
    elif KIND == "geglu_erf":
        below = 0.5 + 0.5 * tl.erf(gate * ROOT_HALF)
        value = gate * below
        derivative = below + gate * DENSITY * tl.exp(-0.5 * gate * gate)
    else:
        # gate * sigmoid(z), where z depends on the kind; slope is dz / dgate.
        if KIND == "swiglu":
            z = gate
            slope = 1.0
        elif KIND == "quick_geglu":
            z = gate * QUICK
            slope = QUICK
        else:
            tl.static_assert(KIND == "geglu")
            square = gate * gate
            z = gate * (TWICE + TWICE * CUBIC * square)
            slope = TWICE + 3.0 * TWICE * CUBIC * square
        sigmoid = 1.0 / (1.0 + tl.exp(-z))
        value = gate * sigmoid
        derivative = sigmoid * (1.0 + gate * slope * (1.0 - sigmoid))
    return value, derivative


@triton.jit
def _forward(
    x,
    y,
    largest,
    x_row,
    columns,
    clamp,
    offset,
    KIND: tl.constexpr,
    CLAMPED: tl.constexpr,
    OFFSET: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x += row * x_row
    gate = tl.load(x + column, inside, 0.0).to(tl.float32)
    up = tl.load(x + columns + column, inside, 0.0).to(tl.float32)
    if CLAMPED:
        gate = tl.minimum(gate, clamp, tl.PropagateNan.ALL)
        up = tl.clamp(up, -clamp, clamp, tl.PropagateNan.ALL)
    if OFFSET:
        up += offset
    value, _ = activation(gate, KIND)
    result = (value * up).to(y.dtype.element_ty)
    tl.store(y + row * columns + column, result, inside)
    if LARGEST:
        raise_largest(largest, tl.where(inside, magnitude_bits(result), 0))


@triton.jit
def _backward(
    x,
    grad,
    result,
    largest,
    x_row,
    columns,
    clamp,
    offset,
    KIND: tl.constexpr,
    CLAMPED: tl.constexpr,
    OFFSET: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x += row * x_row
    gate = tl.load(x + column, inside, 0.0).to(tl.float32)
    up = tl.load(x + columns + column, inside, 0.0).to(tl.float32)
    passed = tl.load(grad + row * columns + column, inside, 0.0).to(tl.float32)
    raw_gate, raw_up = gate, up
    if CLAMPED:
        gate = tl.minimum(gate, clamp, tl.PropagateNan.ALL)
        up = tl.clamp(up, -clamp, clamp, tl.PropagateNan.ALL)
    if OFFSET:
        up += offset
    value, slope = activation(gate, KIND)
    gate_grad = passed * up * slope
    up_grad = passed * value
    if CLAMPED:
        gate_grad = tl.where(raw_gate <= clamp, gate_grad, 0.0)
        up_grad = tl.where((raw_up >= -clamp) & (raw_up <= clamp), up_grad, 0.0)
    result += row * (2 * columns)
    gate_grad = gate_grad.to(result.dtype.element_ty)
    up_grad = up_grad.to(result.dtype.element_ty)
    tl.store(result + column, gate_grad, inside)
    tl.store(result + columns + column, up_grad, inside)
    if LARGEST:
        bits = tl.maximum(magnitude_bits(gate_grad), magnitude_bits(up_grad))
        raise_largest(largest, tl.where(inside, bits, 0))


def _launched(
    kernel: Any, x_TF: Tensor, tensors: tuple[Tensor, ...], kind: str, options: tuple[Any, ...]
) -> None:
    clamp, offset, largest = options
    rows, columns = x_TF.shape[0], x_TF.shape[1] // 2
    if not rows or not columns:
        return
    kernel[(rows, triton.cdiv(columns, BLOCK))](
        x_TF,
        *tensors,
        x_TF.stride(0),
        columns,
        clamp or 0.0,
        offset,
        KIND=kind,
        CLAMPED=clamp is not None,
        OFFSET=bool(offset),
        LARGEST=largest,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


def forward(
    x_TF: Tensor, kind: str, clamp: float | None, offset: float, largest: bool
) -> tuple[Tensor, Tensor]:
    """Return the gated activation and its amax. See ``swiglu.py``."""
    y = x_TF.new_empty(x_TF.shape[0], x_TF.shape[1] // 2)
    most = torch.zeros(int(largest), dtype=torch.float32, device=x_TF.device)
    _launched(_forward, x_TF, (y, most), kind, (clamp, offset, largest))
    return y, most


def backward(
    x_TF: Tensor,
    grad_TF: Tensor,
    kind: str,
    clamp: float | None,
    offset: float,
    largest: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of gate and up, and its amax. See ``swiglu.py``."""
    result = x_TF.new_empty(x_TF.shape)
    most = torch.zeros(int(largest), dtype=torch.float32, device=x_TF.device)
    _launched(_backward, x_TF, (grad_TF, result, most), kind, (clamp, offset, largest))
    return result, most
