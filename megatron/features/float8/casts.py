"""Casts of matrices to 8-bit floating point, in the layouts that 8-bit GEMMs read.

A product [M, K] x [K, N] reads both factors along K, the dimension that it sums over: the left one
row by row, the right one column by column. A matrix [R, C] therefore has two copies: ``rows``,
summed over C, and ``columns``, its transpose, summed over R.

Numbers that share a scale are multiplied by it so that the largest magnitude becomes the largest
number of the 8-bit dtype, and the accumulated result is divided by the scales again (Micikevicius
et al. 2022, arXiv:2209.05433, section 3.2).
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megatron.parallel.compiler import allow_graphs, missing_compiler

BLOCK = 128
"""Edge of a block that shares a scale: 1 x 128 numbers of activations, 128 x 128 of weights."""

Scaling = Literal["tensor", "row", "block", "square"]
"""Numbers that share a scale: a matrix, what a product sums up for one number of its result, 1 x
128 of these, or 128 x 128 numbers."""

GRAPHS = 64
"""Number of versions of a cast that are compiled: one for each layout, dtype and kind of scale, and
again for matrices of a single block. Delayed scales take nine, and torch's default is 8."""

_SMALLEST = 1e-12
"""Lower bound of a largest magnitude, so that a tensor of zeros has a scale."""


class Operand(NamedTuple):
    """A factor of a product: the left one [M, K], or the right one transposed, [N, K].

    Attributes:
        values: 8-bit, contiguous along K.
        scale: what restores the values, float32: [] for a matrix, [M, 1] for rows, [M, K / 128] in
            column-major order for blocks, [M / 128, K / 128, rounded up to 4] for squares.
    """

    values: Tensor
    scale: Tensor


class Cast(NamedTuple):
    """A matrix in 8 bits, in the layouts that were asked for; ``largest`` is its largest magnitude,
    float32 [], where its scale is one for the matrix."""

    rows: Operand | None = None
    columns: Operand | None = None
    largest: Tensor | None = None

    @property
    def known_largest(self) -> Tensor:
        """The largest magnitude, of a cast that has it."""
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
) -> Cast:
    """Rounds a matrix to 8 bits, in one or both layouts, scaled by its own largest magnitudes.
    ``largest``, for a scale per matrix, is used in their place, and larger numbers become the
    largest of the dtype. Infinities and NaN make all values that share their scale NaN, so that the
    check of the loss notices them."""
    if torch.compiler.is_compiling() or not _to_compile(x_RC):
        return _cast(x_RC, dtype, scaling, rows, columns, largest)
    # Operator by operator this moves about five times as many bytes.
    # torch compiles a view again for every shape of what it is a view of.
    result = _compiled_cast()(x_RC.detach(), dtype, scaling, rows, columns, largest)
    # torch marks the outputs of a graph with symbolic sizes as dynamic. A weight that is kept with
    # that mark makes every block that reads it symbolic, and attention leaves the block's graph.
    return tree_map_only(Tensor, Tensor.detach, result)


def _to_compile(x_RC: Tensor) -> bool:
    return x_RC.is_cuda and missing_compiler("cuda") is None


@cache
def _compiled_cast() -> Any:
    allow_graphs(GRAPHS)
    return torch.compile(_cast, dynamic=True)


def _cast(
    x_RC: Tensor,
    dtype: torch.dtype,
    scaling: Scaling,
    rows: bool,
    columns: bool,
    largest: Tensor | None,
) -> Cast:
    if scaling == "tensor":
        return _cast_matrix(x_RC, dtype, rows, columns, largest)
    if scaling == "square":
        return _cast_squares(x_RC, dtype, rows, columns)
    each = _cast_rows if scaling == "row" else _cast_blocks
    return Cast(
        each(x_RC, dtype, 1) if rows else None,
        each(x_RC, dtype, 0) if columns else None,
    )


def _cast_matrix(
    x_RC: Tensor, dtype: torch.dtype, rows: bool, columns: bool, largest: Tensor | None
) -> Cast:
    limit = torch.finfo(dtype).max
    # Along the rows first: a compiler computes that where it computes the rows, as in a norm.
    now = _largest(x_RC, 1).amax()
    if largest is None:
        largest = now.clamp(min=_SMALLEST)
        values_RC = (x_RC.float() * (limit / largest)).to(dtype)
        scale = largest / limit
    else:
        largest = largest.clamp(min=_SMALLEST)
        values_RC = (x_RC.float() * (limit / largest)).clamp(-limit, limit).to(dtype)
        scale = largest / limit + now * 0.0  # NaN where the clamp would hide an infinity
    return Cast(
        Operand(values_RC.contiguous(), scale) if rows else None,
        Operand(values_RC.t().contiguous(), scale) if columns else None,
        now,
    )


def _cast_rows(x_RC: Tensor, dtype: torch.dtype, summed: int) -> Operand:
    limit = torch.finfo(dtype).max
    largest = _largest(x_RC, summed, keepdim=True).clamp(min=_SMALLEST)
    values, scale = (x_RC.float() * (limit / largest)).to(dtype), largest / limit
    values = values if summed else values.t()
    return Operand(values.contiguous(), scale.flatten().unsqueeze(1))


def _cast_blocks(x_RC: Tensor, dtype: torch.dtype, summed: int) -> Operand:
    """1 x 128 numbers along the dimension that is summed over share a scale."""
    rows, columns = x_RC.shape
    if summed:
        blocks = x_RC.reshape(rows, columns // BLOCK, BLOCK)
    else:
        blocks = x_RC.reshape(rows // BLOCK, BLOCK, columns)
    dim = 2 if summed else 1
    factor, scale = _power_of_two(_largest(blocks, dim, keepdim=True), dtype)
    values = (blocks.float() * factor).to(dtype).view(rows, columns)
    if summed:
        return Operand(values.contiguous(), scale.squeeze(2).t().contiguous().t())
    return Operand(values.t().contiguous(), scale.squeeze(1).contiguous().t())


def _cast_squares(x_RC: Tensor, dtype: torch.dtype, rows: bool, columns: bool) -> Cast:
    down, across = (size // BLOCK for size in x_RC.shape)
    squares = x_RC.reshape(down, BLOCK, across, BLOCK)
    factor, scale = _power_of_two(_largest(squares, (1, 3), keepdim=True), dtype)
    values_RC = (squares.float() * factor).to(dtype).view(x_RC.shape)
    scale = scale.view(down, across)
    return Cast(
        Operand(values_RC.contiguous(), _padded(scale)) if rows else None,
        Operand(values_RC.t().contiguous(), _padded(scale.t())) if columns else None,
    )


def _padded(scale: Tensor) -> Tensor:
    # cuBLAS reads the scales of a row of squares in groups of 16 bytes.
    return torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4)).contiguous()


def _power_of_two(largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The largest power of two that may multiply these numbers, and its inverse."""
    ratio = torch.finfo(dtype).max / largest.clamp(min=_SMALLEST)
    exponent = ratio.view(torch.int32) & 0x7F800000  # of a float32, without the bits behind it
    factor = exponent.view(torch.float32)
    return factor, 1.0 / factor


def _largest(x: Tensor, dim: int | tuple[int, ...], keepdim: bool = False) -> Tensor:
    return torch.linalg.vector_norm(x, torch.inf, dim=dim, keepdim=keepdim, dtype=torch.float32)
