"""Triton kernels for :mod:`megatron.features.float8.operators.gated_casts`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.features.float8.operators.casts_triton import grid_of, places_of, rounded
from megatron.kernels.magnitude_triton import magnitude_bits, raise_largest
from megatron.kernels.swiglu_triton import activation

DOWN, ACROSS = 64, 32
"""Numbers of tokens and channels in a program's tile, for each of gate, up and gradient."""


@triton.jit
def _activated(
    x, rows, largest, factor, T, F, KIND: tl.constexpr, ROWS: tl.constexpr, CLAMP: tl.constexpr,
    LIMIT: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    down, across, inside = places_of(T, F, DOWN, ACROSS)
    places = down[:, None] * (2 * F) + across[None, :]
    gate = tl.load(x + places, inside, other=0.0).to(tl.float32)
    up = tl.load(x + places + F, inside, other=0.0).to(tl.float32)
    value, _ = activation(gate, KIND)
    # Round as if the activation were written to memory.
    values = (value * up).to(x.dtype.element_ty).to(tl.float32)
    raise_largest(largest, magnitude_bits(values))
    if ROWS:
        values = rounded(values, tl.load(factor), LIMIT, CLAMP).to(rows.dtype.element_ty)
        tl.store(rows + down[:, None] * F + across[None, :], values, inside)


@triton.jit
def _differentiated(
    x, grad, rows, columns, largest, activations, forward_factor, factor, T, F,
    KIND: tl.constexpr, KNOWN: tl.constexpr, FORWARD_LIMIT: tl.constexpr, LIMIT: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    down, across, inside = places_of(T, F, DOWN, ACROSS)
    places = down[:, None] * (2 * F) + across[None, :]
    gate = tl.load(x + places, inside, other=0.0).to(tl.float32)
    up = tl.load(x + places + F, inside, other=0.0).to(tl.float32)
    passed = tl.load(grad + down[:, None] * F + across[None, :], inside, other=0.0).to(tl.float32)
    value, slope = activation(gate, KIND)
    transposed = across[:, None] * T + down[None, :]
    inside_too = tl.trans(inside)

    values = (value * up).to(x.dtype.element_ty).to(tl.float32)
    values = rounded(values, tl.load(forward_factor), FORWARD_LIMIT, True)
    values = values.to(activations.dtype.element_ty)
    tl.store(activations + transposed, tl.trans(values), inside_too)

    of_gate = (passed * up * slope).to(x.dtype.element_ty)
    of_up = (passed * value).to(x.dtype.element_ty)
    raise_largest(largest, tl.maximum(magnitude_bits(of_gate), magnitude_bits(of_up)))
    if KNOWN:
        by = tl.load(factor)
        of_gate = rounded(of_gate.to(tl.float32), by, LIMIT, True).to(rows.dtype.element_ty)
        of_up = rounded(of_up.to(tl.float32), by, LIMIT, True).to(rows.dtype.element_ty)
        tl.store(columns + transposed, tl.trans(of_gate), inside_too)
        tl.store(columns + tl.cast(F, tl.int64) * T + transposed, tl.trans(of_up), inside_too)
    tl.store(rows + places, of_gate, inside)
    tl.store(rows + places + F, of_up, inside)


def activated(
    x_TG: Tensor, kind: str, factor: Tensor | None, clamp: bool, rows: Tensor, largest: Tensor
) -> None:
    """Write the results of ``activated_in_8_bits`` to ``rows`` and ``largest``."""
    tokens, inner = x_TG.shape[0], x_TG.shape[1] // 2
    _activated[grid_of((tokens, inner), DOWN, ACROSS)](
        x_TG, rows, largest.zero_(), factor, tokens, inner,
        KIND=kind, ROWS=factor is not None, CLAMP=clamp, LIMIT=torch.finfo(rows.dtype).max,
        DOWN=DOWN, ACROSS=ACROSS,
    )  # fmt: skip


def differentiated(
    x_TG: Tensor,
    grad_TF: Tensor,
    kind: str,
    forward_factor: Tensor,
    factor: Tensor | None,
    rows: Tensor,
    columns: Tensor,
    largest: Tensor,
    activations: Tensor,
) -> None:
    """Write the results of ``differentiated_in_8_bits`` to the last four tensors."""
    tokens, inner = grad_TF.shape
    _differentiated[grid_of((tokens, inner), DOWN, ACROSS)](
        x_TG, grad_TF, rows, columns, largest.zero_(), activations,
        forward_factor, factor, tokens, inner, KIND=kind, KNOWN=factor is not None,
        FORWARD_LIMIT=torch.finfo(activations.dtype).max, LIMIT=torch.finfo(columns.dtype).max,
        DOWN=DOWN, ACROSS=ACROSS,
    )  # fmt: skip
