"""Casts of matrices to 8-bit floating point, by rows and by columns in a single read.

An 8-bit GEMM reads both factors along the dimension that it sums over, so that a matrix [R, C] has
two copies: ``rows``, and ``columns``, its transpose. If a compiler fused the transposed copy into
the kernel of a norm, that kernel would write scattered single bytes. A custom operator prevents
this fusion.

Shapes: R rows, C columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.kernels.operators import define
from megatron.kernels.switches import uses

BLOCK = 128
"""Edge length of the blocks that share a scale: 1 x 128 values of a row or column, or a square."""

SMALLEST = 1e-12
"""Lower bound on amax, so that a tensor of zeros has a finite scale."""

Pair = tuple[Tensor, Tensor]


def cast_both(
    x_RC: Tensor,
    dtype: torch.dtype,
    rows_factor: Tensor | None,
    columns_factor: Tensor | None,
    clamp: bool = False,
    measure: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scale a matrix and quantise it to 8 bits. Return the quantised matrix [R, C], its transpose
    [C, R] and its amax.
    """
    run = _CAST_BOTH if uses("casts", x_RC) else cast_formula
    return run(x_RC, dtype, rows_factor, columns_factor, clamp, measure)  # type: ignore[no-any-return]


def cast_blocks(
    x_RC: Tensor, dtype: torch.dtype, squares: bool, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a matrix in 8 bits, with a power of two as the scale of each block: rows [R, C], their
    scales, columns [C, R], and their scales. Layouts that are not requested are empty.

    With ``squares``, blocks are 128 x 128. The scales are [R / 128, C / 128] and [C / 128, R /
    128], with the last dimension zero-padded to a multiple of 4. Otherwise blocks are 128 values of
    a row or column, and the scales are [C / 128, R] and [R / 128, C].
    """
    run = _CAST_BLOCKS if uses("casts", x_RC) else _cast_blocks
    return run(x_RC, dtype, squares, rows, columns)  # type: ignore[no-any-return]


def largest_of_lines(x_RC: Tensor) -> Pair:
    """Return the amax of each row [R] and each column [C], in float32. NaN propagates."""
    run = _LARGEST_OF_LINES if uses("casts", x_RC) else _largest_of_lines
    return run(x_RC)  # type: ignore[no-any-return]


def largest_of(x: Tensor, dim: int | tuple[int, ...] = 1, keepdim: bool = False) -> Tensor:
    """Return the amax along dimensions, in float32. It is NaN if any value is NaN."""
    return torch.linalg.vector_norm(x, torch.inf, dim=dim, keepdim=keepdim, dtype=torch.float32)


def transposed(x_RC: Tensor, source: Tensor) -> Tensor:
    """Return the contiguous transpose [C, R] of an 8-bit matrix that was cast from ``source``."""
    if not uses("casts", source):
        return x_RC.t().contiguous()
    return _TRANSPOSED(x_RC.view(torch.uint8)).view(x_RC.dtype)  # type: ignore[no-any-return]


def cast_formula(
    x_RC: Tensor,
    dtype: torch.dtype,
    rows_factor: Tensor | None,
    columns_factor: Tensor | None,
    clamp: bool,
    measure: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of :func:`cast_both`, computed in torch."""
    limit, empty = torch.finfo(dtype).max, x_RC.new_empty(0, dtype=dtype)

    def rounded(factor: Tensor) -> Tensor:
        values_RC = x_RC.float() * factor
        return (values_RC.clamp(-limit, limit) if clamp else values_RC).to(dtype)

    # Reduce along rows first, which a compiler can fuse with a row-wise producer such as a norm.
    largest = largest_of(x_RC).amax() if measure else x_RC.new_empty(0, dtype=torch.float32)
    rows = columns = empty
    if rows_factor is not None:
        rows = rounded(rows_factor.unsqueeze(-1) if rows_factor.dim() else rows_factor)
    if columns_factor is not None:
        same = rows_factor is columns_factor and not columns_factor.dim()
        values_RC = rows if same else rounded(columns_factor)
        columns = values_RC.t().contiguous()
    return rows, columns, largest


def _cast_blocks(
    x_RC: Tensor, dtype: torch.dtype, squares: bool, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    down, across = (max(1, size // BLOCK) for size in x_RC.shape)
    empty = x_RC.new_empty(0, dtype=dtype), x_RC.new_empty(0, dtype=torch.float32)

    def rounded(blocks: Tensor, dims: int | tuple[int, ...]) -> Pair:
        factor, scale = _power_of_two(largest_of(blocks, dims, keepdim=True), dtype)
        return (blocks.float() * factor).to(dtype).view(x_RC.shape), scale

    by_rows = by_columns = empty
    if squares:
        values_RC, scale = rounded(x_RC.reshape(down, BLOCK, across, BLOCK), (1, 3))
        scale = scale.view(down, across)
        by_rows = (values_RC, _padded(scale)) if rows else empty
        by_columns = (values_RC.t().contiguous(), _padded(scale.t())) if columns else empty
        return *by_rows, *by_columns
    if rows:
        values_RC, scale = rounded(x_RC.reshape(len(x_RC), across, BLOCK), 2)
        by_rows = values_RC, scale.squeeze(2).t().contiguous()
    if columns:
        values_RC, scale = rounded(x_RC.reshape(down, BLOCK, x_RC.shape[1]), 1)
        by_columns = values_RC.t().contiguous(), scale.squeeze(1)
    return *by_rows, *by_columns


def _power_of_two(largest: Tensor, dtype: torch.dtype) -> Pair:
    """Return the largest powers of two that keep these amax values in range, and their inverses."""
    ratio = torch.finfo(dtype).max / largest.clamp(min=SMALLEST)
    # exponent bits of a float32, with the mantissa cleared
    exponent = ratio.view(torch.int32) & 0x7F800000
    factor = exponent.view(torch.float32)
    return factor, 1.0 / factor


def _padded(scale: Tensor) -> Tensor:
    # cuBLAS reads each row of square scales in groups of 16 bytes.
    return torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4)).contiguous()


def padded_squares(scale: Tensor, across: int) -> Tensor:
    """Return the square scales of the transposed matrix, padded. ``across`` is the number of
    squares in a row of the original matrix."""
    return _padded(scale[:, :across].t())


def _largest_of_lines(x_RC: Tensor) -> Pair:
    return largest_of(x_RC, 1), largest_of(x_RC, 0)


def _transposed(x_RC: Tensor) -> Tensor:
    return x_RC.t().clone(memory_format=torch.contiguous_format)


def empty_or(x: Tensor, shape: tuple[int, ...] | None, dtype: torch.dtype) -> Tensor:
    """Return a new tensor of the given shape, or an empty one if ``shape`` is None."""
    return x.new_empty((0,) if shape is None else shape, dtype=dtype)


def _both_shapes(
    x_RC: Tensor,
    dtype: torch.dtype,
    rows_factor: Tensor | None,
    columns_factor: Tensor | None,
    clamp: bool,
    measure: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = x_RC.shape
    return (
        empty_or(x_RC, None if rows_factor is None else (rows, columns), dtype),
        empty_or(x_RC, None if columns_factor is None else (columns, rows), dtype),
        empty_or(x_RC, () if measure else None, torch.float32),
    )


def _block_shapes(
    x_RC: Tensor, dtype: torch.dtype, squares: bool, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    size_R, size_C = x_RC.shape
    down, across = size_R // BLOCK, size_C // BLOCK
    scales = ((across, size_R), (down, size_C))
    if squares:
        scales = ((down, across + -across % 4), (across, down + -down % 4))
    return (
        empty_or(x_RC, (size_R, size_C) if rows else None, dtype),
        empty_or(x_RC, scales[0] if rows else None, torch.float32),
        empty_or(x_RC, (size_C, size_R) if columns else None, dtype),
        empty_or(x_RC, scales[1] if columns else None, torch.float32),
    )


def _both_on_gpu(
    x_RC: Tensor,
    dtype: torch.dtype,
    rows_factor: Tensor | None,
    columns_factor: Tensor | None,
    clamp: bool,
    measure: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from megatron.features.float8.operators import casts_triton

    results = _both_shapes(x_RC, dtype, rows_factor, columns_factor, clamp, measure)
    casts_triton.cast_both(x_RC.contiguous(), rows_factor, columns_factor, clamp, *results)
    return results


def _blocks_on_gpu(
    x_RC: Tensor, dtype: torch.dtype, squares: bool, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from megatron.features.float8.operators import casts_triton

    results = _block_shapes(x_RC, dtype, squares, rows, columns)
    casts_triton.cast_blocks(x_RC.contiguous(), squares, *results)
    return results


def _lines_on_gpu(x_RC: Tensor) -> Pair:
    from megatron.features.float8.operators import casts_triton

    return casts_triton.largest_of_lines(x_RC.contiguous())


def _transposed_on_gpu(x_RC: Tensor) -> Tensor:
    from megatron.features.float8.operators import casts_triton

    return casts_triton.transposed(x_RC.contiguous())


_CAST_BOTH = define(
    "cast_both(Tensor x, ScalarType dtype, Tensor? rows_factor, Tensor? columns_factor, "
    "bool clamp, bool measure) -> (Tensor, Tensor, Tensor)",
    cast_formula,
    _both_shapes,
    _both_on_gpu,
)
_CAST_BLOCKS = define(
    "cast_blocks(Tensor x, ScalarType dtype, bool squares, bool rows, bool columns) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _cast_blocks,
    _block_shapes,
    _blocks_on_gpu,
)
_LARGEST_OF_LINES = define(
    "largest_of_lines(Tensor x) -> (Tensor, Tensor)",
    _largest_of_lines,
    lambda x: tuple(x.new_empty(size, dtype=torch.float32) for size in x.shape),
    _lines_on_gpu,
)
_TRANSPOSED = define(
    "transposed(Tensor x) -> Tensor",
    _transposed,
    lambda x: x.new_empty(x.shape[1], x.shape[0]),
    _transposed_on_gpu,
)
