"""Triton kernels for :mod:`megatron.features.float8.operators.casts`. Each tile of a matrix is read
once. Rows are written from registers, and columns after a transposition in shared memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels.magnitude_triton import magnitude_bits, raise_largest

TILE = 64
BYTES = 128
"""Edge lengths of tiles: ``TILE`` for 16- or 32-bit values, ``BYTES`` for bytes."""
BLOCK = 128
SMALLEST = tl.constexpr(1e-12)


@triton.jit
def places_of(R, C, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """Return the row and column indices of a program's tile, and a mask of those in range."""
    # 64-bit indices, since a matrix may have more than 2^31 elements
    down = tl.program_id(1).to(tl.int64) * DOWN + tl.arange(0, DOWN)
    across = tl.program_id(0).to(tl.int64) * ACROSS + tl.arange(0, ACROSS)
    return down, across, (down[:, None] < R) & (across[None, :] < C)


@triton.jit
def rounded(values, factor, LIMIT: tl.constexpr, CLAMP: tl.constexpr):
    values = values * factor
    if CLAMP:
        values = tl.clamp(values, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return values


@triton.jit
def cast_tiles_kernel(
    x, rows, columns, rows_factor, columns_factor, largest, R, C,
    LIMIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LINES: tl.constexpr,
    CLAMP: tl.constexpr, MEASURE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    down, across, inside = places_of(R, C, TILE, TILE)
    values = tl.load(x + down[:, None] * C + across[None, :], inside, other=0.0).to(tl.float32)
    if MEASURE:
        raise_largest(largest, magnitude_bits(values))
    if ROWS:
        if LINES:
            factor = tl.load(rows_factor + down, down < R, other=0.0)[:, None]
        else:
            factor = tl.load(rows_factor)
        by_rows = rounded(values, factor, LIMIT, CLAMP).to(rows.dtype.element_ty)
        tl.store(rows + down[:, None] * C + across[None, :], by_rows, inside)
    if COLUMNS:
        if LINES:
            factor = tl.load(columns_factor + across, across < C, other=0.0)[None, :]
        else:
            factor = tl.load(columns_factor)
        by_columns = rounded(values, factor, LIMIT, CLAMP).to(columns.dtype.element_ty)
        places = across[:, None] * R + down[None, :]
        tl.store(columns + places, tl.trans(by_columns), tl.trans(inside))


@triton.jit
def transpose_tiles_kernel(x, out, R, C, TILE: tl.constexpr):
    down, across, inside = places_of(R, C, TILE, TILE)
    values = tl.load(x + down[:, None] * C + across[None, :], inside, other=0)
    tl.store(out + across[:, None] * R + down[None, :], tl.trans(values), tl.trans(inside))


@triton.jit
def measure_tiles_kernel(x, rows, columns, R, C, TILE: tl.constexpr):
    down, across, inside = places_of(R, C, TILE, TILE)
    values = tl.load(x + down[:, None] * C + across[None, :], inside, other=0.0).to(tl.float32)
    bits = magnitude_bits(values)
    tl.atomic_max(rows + down, tl.max(bits, 1), down < R, sem="relaxed")
    tl.atomic_max(columns + across, tl.max(bits, 0), across < C, sem="relaxed")


@triton.jit
def _power_of_two(bits, LIMIT: tl.constexpr):
    largest = tl.maximum(
        bits.to(tl.float32, bitcast=True), SMALLEST, propagate_nan=tl.PropagateNan.ALL
    )
    ratio = tl.div_rn(tl.full(largest.shape, LIMIT, tl.float32), largest)
    factor = (ratio.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.div_rn(tl.full(largest.shape, 1.0, tl.float32), factor)
    # Keep NaN, whose exponent bits are those of infinity: GPUs would round infinite products to the
    # largest 8-bit number.
    return tl.where(ratio != ratio, ratio, factor), scale


@triton.jit
def cast_blocks_kernel(
    x, rows, columns, rows_scale, columns_scale, R, C, rows_pitch, columns_pitch,
    LIMIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SQUARES: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    down, across, inside = places_of(R, C, TILE, TILE)
    above, left = tl.program_id(1), tl.program_id(0)
    values = tl.load(x + down[:, None] * C + across[None, :], inside, other=0.0).to(tl.float32)
    bits = magnitude_bits(values)
    if ROWS:
        if SQUARES:
            factor, scale = _power_of_two(tl.max(bits) + tl.zeros((1, 1), tl.int32), LIMIT)
            place = above * rows_pitch + left + tl.zeros((1, 1), tl.int32)
            tl.store(rows_scale + place, scale)
        else:
            factor, scale = _power_of_two(tl.max(bits, 1), LIMIT)
            tl.store(rows_scale + left * rows_pitch + down, scale, down < R)
            factor = factor[:, None]
        by_rows = (values * factor).to(rows.dtype.element_ty)
        tl.store(rows + down[:, None] * C + across[None, :], by_rows, inside)
    if COLUMNS:
        if SQUARES:
            factor, scale = _power_of_two(tl.max(bits) + tl.zeros((1, 1), tl.int32), LIMIT)
            tl.store(
                columns_scale + left * columns_pitch + above + tl.zeros((1, 1), tl.int32), scale
            )
        else:
            factor, scale = _power_of_two(tl.max(bits, 0), LIMIT)
            tl.store(columns_scale + above * columns_pitch + across, scale, across < C)
            factor = factor[None, :]
        by_columns = (values * factor).to(columns.dtype.element_ty)
        places = across[:, None] * R + down[None, :]
        tl.store(columns + places, tl.trans(by_columns), tl.trans(inside))


def cast_both(
    x_RC: Tensor,
    rows_factor: Tensor | None,
    columns_factor: Tensor | None,
    clamp: bool,
    rows: Tensor,
    columns: Tensor,
    largest: Tensor,
) -> None:
    """Write the results of ``casts.cast_both`` to the tensors that are not empty."""
    first = columns_factor if rows_factor is None else rows_factor
    assert first is not None
    if largest.numel():
        largest.zero_()
    cast_tiles_kernel[grid_of(x_RC.shape, TILE, TILE)](
        x_RC, rows, columns, first if rows_factor is None else rows_factor,
        first if columns_factor is None else columns_factor, largest,
        *x_RC.shape,
        LIMIT=torch.finfo(rows.dtype).max, ROWS=rows_factor is not None,
        COLUMNS=columns_factor is not None, LINES=first.dim() > 0, CLAMP=clamp,
        MEASURE=largest.numel() > 0, TILE=TILE,
    )  # fmt: skip


def cast_blocks(
    x_RC: Tensor,
    squares: bool,
    rows: Tensor,
    rows_scale: Tensor,
    columns: Tensor,
    columns_scale: Tensor,
) -> None:
    """Write the results of ``casts.cast_blocks`` to the tensors that are not empty."""
    for scale in (rows_scale, columns_scale) if squares else ():
        scale.zero_()  # clears the padding after the last square
    cast_blocks_kernel[grid_of(x_RC.shape, BLOCK, BLOCK)](
        x_RC, rows, columns, rows_scale, columns_scale, *x_RC.shape,
        *(scale.shape[1] if scale.numel() else 0 for scale in (rows_scale, columns_scale)),
        LIMIT=torch.finfo(rows.dtype).max, ROWS=rows.numel() > 0, COLUMNS=columns.numel() > 0,
        SQUARES=squares, TILE=BLOCK, num_warps=8,
    )  # fmt: skip


def largest_of_lines(x_RC: Tensor) -> tuple[Tensor, Tensor]:
    """Implement :func:`megatron.features.float8.operators.casts.largest_of_lines`."""
    rows, columns = (x_RC.new_zeros(size, dtype=torch.int32) for size in x_RC.shape)
    measure_tiles_kernel[grid_of(x_RC.shape, BYTES, BYTES)](
        x_RC, rows, columns, *x_RC.shape, TILE=BYTES, num_warps=8
    )
    return rows.view(torch.float32), columns.view(torch.float32)


def transposed(x_RC: Tensor) -> Tensor:
    """Return the transpose [C, R] of a matrix of bytes."""
    out = x_RC.new_empty(x_RC.shape[1], x_RC.shape[0])
    transpose_tiles_kernel[grid_of(x_RC.shape, BYTES, BYTES)](
        x_RC, out, *x_RC.shape, TILE=BYTES, num_warps=8
    )
    return out


def grid_of(shape: Sequence[int], down: int, across: int) -> tuple[int, int]:
    """Return the grid of programs that covers a matrix with tiles."""
    rows, columns = shape
    return triton.cdiv(columns, across), triton.cdiv(rows, down)
