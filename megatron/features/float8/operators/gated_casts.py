"""Gated activations of MLPs, and their gradients, cast to 8 bits by the kernels that compute them.

If the scale is known, gate and up are read only once, and no activation is written in 16 bits. A
layer's backward pass also needs the activation's columns. It recomputes them, since it reads gate
and up anyway, so that they need not be saved.

The kinds of activation and their formulas are those of :mod:`megatron.kernels.swiglu`.

Shapes: T tokens, F inner width; gate and up are [T, 2F].
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.features.float8.operators.casts import Pair, cast_formula, empty_or
from megatron.kernels import swiglu
from megatron.kernels.operators import define


def _activated(
    x_TG: Tensor, kind: str, dtype: torch.dtype, factor: Tensor | None, clamp: bool
) -> Pair:
    y_TF, _ = swiglu.swiglu(x_TG, kind, None, 0.0, False)
    rows, _, largest = cast_formula(y_TF, dtype, factor, None, clamp, True)
    return rows, largest


def _differentiated(
    x_TG: Tensor,
    grad_TF: Tensor,
    kind: str,
    forward_dtype: torch.dtype,
    forward_factor: Tensor,
    dtype: torch.dtype,
    factor: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y_TF, _ = swiglu.swiglu(x_TG, kind, None, 0.0, False)
    _, columns, _ = cast_formula(y_TF, forward_dtype, None, forward_factor, True, False)
    grad_TG, _ = swiglu.swiglu_backward(x_TG, grad_TF, kind, None, 0.0, False)
    rows, grad_columns, largest = cast_formula(grad_TG, dtype, factor, factor, True, True)
    return grad_TG if factor is None else rows, grad_columns, largest, columns


def _activated_shapes(
    x_TG: Tensor, kind: str, dtype: torch.dtype, factor: Tensor | None, clamp: bool
) -> Pair:
    tokens, both = x_TG.shape
    rows = empty_or(x_TG, None if factor is None else (tokens, both // 2), dtype)
    return rows, x_TG.new_empty((), dtype=torch.float32)


def _differentiated_shapes(
    x_TG: Tensor,
    grad_TF: Tensor,
    kind: str,
    forward_dtype: torch.dtype,
    forward_factor: Tensor,
    dtype: torch.dtype,
    factor: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, both = x_TG.shape
    known = factor is not None
    return (
        x_TG.new_empty((tokens, both), dtype=dtype if known else x_TG.dtype),
        empty_or(x_TG, (both, tokens) if known else None, dtype),
        x_TG.new_empty((), dtype=torch.float32),
        x_TG.new_empty((both // 2, tokens), dtype=forward_dtype),
    )


def _activated_on_gpu(
    x_TG: Tensor, kind: str, dtype: torch.dtype, factor: Tensor | None, clamp: bool
) -> Pair:
    from megatron.features.float8.operators import gated_casts_triton

    rows, largest = _activated_shapes(x_TG, kind, dtype, factor, clamp)
    gated_casts_triton.activated(x_TG.contiguous(), kind, factor, clamp, rows, largest)
    return rows, largest


def _differentiated_on_gpu(
    x_TG: Tensor,
    grad_TF: Tensor,
    kind: str,
    forward_dtype: torch.dtype,
    forward_factor: Tensor,
    dtype: torch.dtype,
    factor: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from megatron.features.float8.operators import gated_casts_triton

    results = _differentiated_shapes(
        x_TG, grad_TF, kind, forward_dtype, forward_factor, dtype, factor
    )
    gated_casts_triton.differentiated(
        x_TG.contiguous(), grad_TF.contiguous(), kind, forward_factor, factor, *results
    )
    return results


activated = define(
    "activated_in_8_bits(Tensor x, str kind, ScalarType dtype, Tensor? factor, bool clamp) "
    "-> (Tensor, Tensor)",
    _activated,
    _activated_shapes,
    _activated_on_gpu,
)
"""Operator that returns the gated activation of gate and up [T, 2F] times ``factor``, float32 [],
in 8 bits [T, F], and its amax, float32 []. Without a factor the first result is empty. With
``clamp``, products are limited to the range of ``dtype``."""

differentiated = define(
    "differentiated_in_8_bits(Tensor x, Tensor grad, str kind, ScalarType forward_dtype, "
    "Tensor forward_factor, ScalarType dtype, Tensor? factor) -> (Tensor, Tensor, Tensor, Tensor)",
    _differentiated,
    _differentiated_shapes,
    _differentiated_on_gpu,
)
"""Operator that returns the gradient of gate and up, given the activation's gradient [T, F], as
rows [T, 2F] and columns [2F, T], multiplied by ``factor`` and clamped to ``dtype``, and its amax.
Without a factor the rows have the dtype of gate and up, and the columns are empty. The last result
is the activation as columns [F, T], multiplied by ``forward_factor`` and clamped to
``forward_dtype``."""
