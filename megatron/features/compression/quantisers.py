"""Quantisers and masks of DeepSpeed's compression (``deepspeed.compression.utils`` and
``deepspeed.runtime.quantize`` in DeepSpeed 0.19.6).

They apply the same operations in the same order, in the dtype of their input. Unlike there, a group
whose scale would be zero stays finite.

Shapes: G groups, N elements per group, O outputs, I inputs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def quantise(
    x: Tensor, bits: int, groups: int, symmetric: bool = True, noise: Tensor | None = None
) -> Tensor:
    """Quantise ``x`` to at most 2^bits different values (3 for 2 bits) in each of ``groups`` equal
    slices of its flattened elements. ``noise``, in [-1/2, 1/2] and shaped like ``x``, makes the
    rounding stochastic; 1 and 2 bits ignore it and ``symmetric``."""
    x_GN = x.reshape(groups, -1)
    if bits == 2:
        y_GN = ternary(x_GN)
    elif bits == 1:
        y_GN = x_GN.sign() * x_GN.norm(p=1, dim=1, keepdim=True).div(x_GN.shape[1])
    else:
        lowest, highest = x_GN.amin(dim=-1, keepdim=True), x_GN.amax(dim=-1, keepdim=True)
        drawn = None if noise is None else noise.reshape(groups, -1)
        y_GN = within(x_GN, lowest, highest, bits, symmetric, drawn)
    return y_GN.reshape(x.shape)


def within(
    x: Tensor,
    lowest: Tensor,
    highest: Tensor,
    bits: int,
    symmetric: bool,
    noise: Tensor | None = None,
) -> Tensor:
    """Quantise ``x`` to 2^bits levels between ``lowest`` and ``highest``, which broadcast to ``x``.
    If ``symmetric``, the levels are centred on 0 and cover the larger of the two magnitudes."""
    levels = 2**bits
    if symmetric:
        scale = 2 * torch.max(lowest.abs(), highest.abs()) / levels
        steps = _rounded(x / scale, noise).clamp(-(levels // 2), levels // 2 - 1)
        return torch.where(scale > 0, steps * scale, 0.0)
    scale = (highest - lowest) / levels
    zero = (lowest / scale).round() * scale
    y = _rounded((x - zero) / scale, noise).clamp(0, levels - 1) * scale + zero
    return torch.where(scale > 0, y, x)


def _rounded(x: Tensor, noise: Tensor | None) -> Tensor:
    return (x if noise is None else x + noise).round()


def ternary(x_GN: Tensor) -> Tensor:
    """Quantise each group to -a, 0 and a. The value a is the mean magnitude of the elements whose
    magnitude exceeds 0.7 times the group's mean magnitude (Li et al. 2016, arXiv:1605.04711)."""
    mean_G1 = x_GN.norm(p=1, dim=1).div(x_GN.shape[1]).view(-1, 1)
    threshold_G1 = 0.7 * mean_G1
    above, below = ((x_GN > threshold_G1).to(x_GN), (x_GN < -threshold_G1).to(x_GN))
    kept = (x_GN.abs() > threshold_G1).to(x_GN)
    alpha_G1 = ((kept * x_GN).abs().sum(dim=1) / kept.sum(dim=1).clamp(min=1)).view(-1, 1)
    return alpha_G1 * above - alpha_G1 * below


def largest(scores: Tensor, ratio: float) -> Tensor:
    """Return a mask shaped like ``scores``: 1 for the ceil(ratio x n) largest of n scores, else
    0."""
    _, order = scores.flatten().sort(descending=True)
    mask = torch.zeros_like(scores).flatten()
    mask[order[: math.ceil(ratio * scores.numel())]] = 1.0
    return mask.view_as(scores)


class StraightThrough(torch.autograd.Function):
    """Straight-through estimator: returns ``y`` in the forward pass, and passes the gradient to
    ``x`` (Bengio et al. 2013, arXiv:1308.3432)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def falls(steps: int, period: int) -> int:
    """Return how often the number of bits has decreased after ``steps`` quantisations: once each
    after ``period`` steps, 2 x ``period``, 4 x ``period`` and so on."""
    return (steps // period).bit_length()


def bits_after(steps: int, start: int, target: int, period: int) -> int:
    """Return the number of bits used in the quantisation numbered ``steps``, from 1."""
    return max(target, start - falls(steps, period))


def share_of_weights(steps: int, start: int, target: int, period: int, change: float) -> float:
    """Return the fraction of the unquantised weight in a mixed quantisation
    (``fp16_mixed_quantize``). It falls by ``change`` per step, and restarts at 1 whenever the
    number of bits decreases."""
    fallen = min(falls(steps, period), start - target)
    since = period << (fallen - 1) if fallen else 0
    return max(0.0, 1.0 - change * (steps - since))
