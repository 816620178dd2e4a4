"""GEMMs of linear layers in 8-bit floating point, with scales computed from the current values.

A tensor is scaled so that its largest magnitude becomes the largest number of the 8-bit dtype, and
the accumulated result is divided by the scales again (Micikevicius et al. 2022, arXiv:2209.05433,
section 3.2). Weights keep their dtype: every GEMM casts them again.

Shapes: T tokens, I input, O output; M, K, N are those of a GEMM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.parallel.tensor_parallel import autocast_dtype

MULTIPLE = 16
"""Both widths of a layer and its tokens must be multiples of it: the alignment of 8-bit GEMMs on
GPUs, required on a CPU as well."""

FIRST_CAPABILITY = (8, 9)
"""The first CUDA compute capability with 8-bit floating-point GEMMs (Ada)."""

_FORWARD = torch.float8_e4m3fn
_SMALLEST = 1e-12
"""Lower bound of a largest magnitude, so that a tensor of zeros has a scale."""


@dataclass(frozen=True)
class Float8:
    """How the linear layers of a block multiply in 8 bits. ``hybrid``: gradients are E5M2, inputs
    and weights always E4M3. ``rowwise``: each row of the left matrix and each column of the right
    one has its own scale, instead of one for each matrix."""

    hybrid: bool = True
    rowwise: bool = False

    def linear(self, x_BSI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        """x W^T + b with its gradients, [B, S, O]. Raises ValueError if weights are trained and the
        number of tokens is not a multiple of 16."""
        if weight_OI.requires_grad and torch.is_grad_enabled():
            check_tokens(x_BSI.shape[:-1].numel())
        # Rows of tokens inside: a function's result may be overwritten unless it is a view.
        y_TO = _Float8Linear.apply(x_BSI.flatten(0, -2), weight_OI, bias_O, self)
        return y_TO.unflatten(0, x_BSI.shape[:-1])

    def output(self, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        """x W^T, [T, O] in the dtype of x."""
        return self._gemm(x_TI, _FORWARD, weight_OI.t(), fast=True)

    def input_gradient(self, grad_TO: Tensor, weight_OI: Tensor) -> Tensor:
        """g W, [T, I] in the dtype of g."""
        return self._gemm(grad_TO, self._backward, weight_OI)

    def weight_gradient(self, grad_TO: Tensor, x_TI: Tensor) -> Tensor:
        """g^T x, [O, I] in the dtype of g."""
        return self._gemm(grad_TO.t(), self._backward, x_TI)

    @property
    def _backward(self) -> torch.dtype:
        return torch.float8_e5m2 if self.hybrid else _FORWARD

    def _gemm(
        self, left_MK: Tensor, left_dtype: torch.dtype, right_KN: Tensor, fast: bool = False
    ) -> Tensor:
        # GPUs need the left matrix row-major and the right one column-major, and accept scales by
        # row for bfloat16 results only. On a CPU those would be rounded several times, and autocast
        # would change the dtype.
        result = torch.bfloat16 if self.rowwise else left_MK.dtype
        with torch.autocast(left_MK.device.type, enabled=False):
            left, left_scale = self._quantised(left_MK, left_dtype, 1)
            right, right_scale = self._quantised(right_KN, _FORWARD, 0)
            found = torch._scaled_mm(
                left.contiguous(),
                right.t().contiguous().t(),
                scale_a=left_scale,
                scale_b=right_scale,
                out_dtype=torch.float32 if left.device.type == "cpu" else result,
                # Faster accumulation of lower precision is enough for outputs, not for gradients.
                use_fast_accum=fast,
            )
        return found.to(left_MK.dtype)

    def _quantised(self, x: Tensor, dtype: torch.dtype, summed: int) -> tuple[Tensor, Tensor]:
        """8-bit values, and the factor that restores them. Infinities and NaN make all values that
        share their scale NaN, so that a loss scaler and the check of the loss notice them."""
        dims = summed if self.rowwise else None
        largest = torch.linalg.vector_norm(
            x, torch.inf, dim=dims, keepdim=self.rowwise, dtype=torch.float32
        ).clamp(min=_SMALLEST)
        limit = torch.finfo(dtype).max
        return (x.float() * (limit / largest)).to(dtype), largest / limit


def check_tokens(count: int) -> None:
    """Raises ValueError if weight gradients cannot be summed over ``count`` tokens in 8 bits."""
    if count % MULTIPLE:
        raise ValueError(
            f"--fp8-format: the {count} tokens of a micro batch are not a multiple of {MULTIPLE}; "
            "choose --micro-batch-size x --seq-length, and every length of a curriculum, so that "
            "they are, or leave --fp8-format out"
        )


class _Float8Linear(torch.autograd.Function):
    # The parameter is saved as it came; see _ColumnLinear in layers.py.

    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, weight: Tensor, bias: Tensor | None, float8: Float8
    ) -> Tensor:
        ctx.float8, ctx.input_dtype = float8, x_TI.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        x_TI = x_TI.to(autocast_dtype(x_TI))
        ctx.save_for_backward(x_TI, weight)
        y_TO = float8.output(x_TI, weight)
        return y_TO if bias is None else y_TO + bias.to(y_TO.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, weight = ctx.saved_tensors
        x_grad = weight_grad = bias_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = ctx.float8.input_gradient(grad_TO, weight).to(ctx.input_dtype)
        if ctx.needs_input_grad[1]:
            weight_grad = ctx.float8.weight_gradient(grad_TO, x_TI).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            bias_grad = grad_TO.sum(0).to(ctx.bias_dtype)
        return x_grad, weight_grad, bias_grad, None
