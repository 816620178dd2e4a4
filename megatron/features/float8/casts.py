"""Casts of matrices to 8-bit floating point, in the layouts that 8-bit GEMMs read.

A product [M, K] x [K, N] reads both factors along K, the dimension that it sums over: the left one
row by row, the right one column by column. A matrix [R, C] therefore has two copies: ``rows``,
summed over C, and ``columns``, its transpose, summed over R.

All values that share a scale are multiplied by one factor, which maps their amax (largest
magnitude) to the largest number of the 8-bit dtype. The accumulated result is divided by the
factors again (Micikevicius et al. 2022, arXiv:2209.05433, section 3.2).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron.features.float8.operators.casts import (
    BLOCK,
    SMALLEST,
    cast_blocks,
    cast_both,
    largest_of,
    largest_of_lines,
    padded_squares,
    transposed,
)

Scaling = Literal["tensor", "row", "block", "square"]
"""Which values share a scale: a whole matrix; a row or column along the summed dimension; blocks of
1 x 128 in these; or squares of 128 x 128."""


class Operand(NamedTuple):
    """Factor of a product, stored as [M, K] if it is on the left, and transposed, as [N, K], if it
    is on the right.

    Attributes:
        values: 8-bit, contiguous along K.
        scale: multiplies the values to restore them, float32: [] for a matrix, [M, 1] for rows,
            [M, K / 128] in column-major order for blocks, [M / 128, K / 128] for squares, whose
            last dimension is padded to a multiple of 4.
    """

    values: Tensor
    scale: Tensor


class Cast(NamedTuple):
    """A matrix in 8 bits, in the requested layouts. ``largest`` is its amax, float32 [], if it was
    given or measured."""

    rows: Operand | None = None
    columns: Operand | None = None
    largest: Tensor | None = None

    @property
    def known_largest(self) -> Tensor:
        """``largest``, for a cast that is known to have it."""
        assert self.largest is not None
        return self.largest


def cast(
    x_RC: Tensor,
    dtype: torch.dtype,
    scaling: Scaling,
    *,
    rows: bool = False,
    columns: bool = False,
    largest: Tensor | None = None,
    earlier: Tensor | None = None,
) -> Cast:
    """Round a matrix to 8 bits in one or both layouts, scaled by its own amax values. Infinities
    and NaN make all values with the same scale NaN, so that the loss check detects them.

    Args:
        largest: amax of the matrix, if its producer has measured it. Only for one scale per
            matrix.
        earlier: amax of earlier steps, which sets the scale instead of the current one. Larger
            values are clamped to the dtype's range. Only for one scale per matrix.
    """
    if scaling == "tensor":
        return _cast_matrix(x_RC, dtype, rows, columns, largest, earlier)
    if scaling == "row":
        return _cast_lines(x_RC, dtype, rows, columns)
    squares = scaling == "square"
    by_rows, rows_scale, by_columns, columns_scale = cast_blocks(
        x_RC, dtype, squares, rows, columns
    )
    if not squares:
        rows_scale, columns_scale = (
            x.t() if x.dim() == 2 else x for x in (rows_scale, columns_scale)
        )
    return Cast(
        Operand(by_rows, rows_scale) if rows else None,
        Operand(by_columns, columns_scale) if columns else None,
    )


def _cast_matrix(
    x_RC: Tensor,
    dtype: torch.dtype,
    rows: bool,
    columns: bool,
    largest: Tensor | None,
    earlier: Tensor | None,
) -> Cast:
    if earlier is None and largest is None:
        largest = largest_of(x_RC).amax()
    factor, _ = factor_and_scale(dtype, largest, earlier)
    by_rows, by_columns, measured = cast_both(
        x_RC,
        dtype,
        factor if rows else None,
        factor if columns else None,
        clamp=earlier is not None,
        measure=largest is None,
    )
    largest = measured if largest is None else largest
    _, scale = factor_and_scale(dtype, largest, earlier)
    return Cast(
        Operand(by_rows, scale) if rows else None,
        Operand(by_columns, scale) if columns else None,
        largest,
    )


def factor_and_scale(
    dtype: torch.dtype, largest: Tensor | None, earlier: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the factor by which a matrix is multiplied before rounding to ``dtype``, and the
    scale, its inverse. They are computed from ``earlier``, the amax of earlier steps, or if it is
    None from ``largest``, the current one; both are float32 []. With both, a ``largest`` that is
    infinite or NaN makes the scale NaN."""
    limit = torch.finfo(dtype).max
    bound = largest if earlier is None else earlier
    assert bound is not None
    bound = bound.clamp(min=SMALLEST)
    scale = bound / limit
    if earlier is not None and largest is not None:
        # makes the scale NaN for an infinity, which the clamp would hide
        scale = scale + largest * 0.0
    return limit / bound, scale


def _cast_lines(x_RC: Tensor, dtype: torch.dtype, rows: bool, columns: bool) -> Cast:
    limit = torch.finfo(dtype).max
    if rows and columns:
        largest = [*largest_of_lines(x_RC)]
    else:
        largest = [largest_of(x_RC, 1 if rows else 0)]
    bounds = [each.clamp(min=SMALLEST) for each in largest]
    factors, scales = (
        [limit / each for each in bounds],
        [(each / limit).unsqueeze(1) for each in bounds],
    )
    by_rows, by_columns, _ = cast_both(
        x_RC, dtype, factors[0] if rows else None, factors[-1] if columns else None
    )
    return Cast(
        Operand(by_rows, scales[0]) if rows else None,
        Operand(by_columns, scales[-1]) if columns else None,
    )


def columns_of(rows: Operand, scaling: Scaling, source: Tensor) -> Operand:
    """Derive a matrix's columns from its rows, for one scale per matrix or per square. ``source``
    is the matrix before the cast."""
    values = transposed(rows.values, source)
    if scaling == "tensor":
        return Operand(values, rows.scale)
    assert scaling == "square", scaling
    return Operand(values, padded_squares(rows.scale, rows.values.shape[1] // BLOCK))
