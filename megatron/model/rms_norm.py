"""Root-mean-square norm (Zhang and Sennrich 2019, arXiv:1910.07467) for the CPU, where torch
composes it of a dozen passes over memory.

Rows are taken so many at a time that what is computed of them stays in the processor's cache.
Shapes: T rows, H width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHUNK = 1 << 16
"""Elements of the rows that are worked on at once: 256 KiB in float32."""


def rms_norm(x: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight, computed in float32 or better.

    Args:
        x: [..., H].
        weight_H: in the number format of x.
        epsilon: added to the mean.

    Returns:
        Shape and number format of x.
    """
    return _RMSNorm.apply(x, weight_H, epsilon)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
        kind = torch.promote_types(x.dtype, torch.float32)
        x_TH = x.reshape(-1, x.shape[-1])
        factor_T1 = torch.linalg.vector_norm(x_TH, dim=-1, keepdim=True, dtype=kind)
        factor_T1.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight_H, factor_T1)
        y_TH, weight_H = torch.empty_like(x_TH), weight_H.to(kind)
        for x_CH, factor_C1, y_CH in _chunks(x_TH, factor_T1, y_TH):
            y_CH.copy_((x_CH.to(kind) * factor_C1).mul_(weight_H))
        return y_TH.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, factor_T1 = ctx.saved_tensors
        width, kind = x.shape[-1], factor_T1.dtype
        x_TH, weight_H = x.reshape(-1, width), weight.to(kind)
        x_grad_TH, weight_grad_H = torch.empty_like(x_TH), torch.zeros_like(weight_H)
        grad_TH = grad.reshape(-1, width)
        for x_CH, factor_C1, grad_CH, x_grad_CH in _chunks(x_TH, factor_T1, grad_TH, x_grad_TH):
            # With n = x * factor and d = grad * weight: (d - n * mean(n * d)) * factor.
            n_CH, grad_CH = x_CH.to(kind) * factor_C1, grad_CH.to(kind)
            weight_grad_H += (grad_CH * n_CH).sum(0)
            d_CH = grad_CH * weight_H
            mean_C1 = torch.linalg.vecdot(d_CH, n_CH).unsqueeze(-1).div_(width)
            x_grad_CH.copy_(d_CH.addcmul_(n_CH, mean_C1, value=-1).mul_(factor_C1))
        return x_grad_TH.view(x.shape), weight_grad_H.to(weight.dtype), None


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    rows = max(1, _CHUNK // tensors[0].shape[-1])
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)
