"""8-bit weights with scales. A scale applies to a block of 128 x 128, as in DeepSeek-V3
(arXiv:2412.19437, section 3.3.2; README_WEIGHTS.md in its repository), to an output, or to a whole
weight (fbgemm_fp8; compressed-tensors' float-quantized and int-quantized).

A weight ``NAME`` is stored as two tensors. ``NAME`` contains int8 or float8 values with four
exponent and three mantissa bits. ``NAME_scale_inv`` or ``NAME_scale`` contains the factor of each
block. Blocks at the lower and right edge are smaller if a size is not a multiple of the block's.

Shapes: O outputs, I inputs, P and Q numbers of blocks, rounded up. Further dimensions, such as
experts, may precede these.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.formats.huggingface.packed.form import PackedForm, Shape, StoredParts

SCALES = "_scale_inv"
"""Name suffix of scales in DeepSeek's files."""
BLOCK = 128
"""Rows and columns of a block in DeepSeek's files."""
DTYPE = torch.float8_e4m3fn
Block = tuple[int, int]
"""Rows and columns of a block; 0 means all rows or columns of the weight."""


def check_scales(weight: Shape, scales: Shape, block: Block = (BLOCK, BLOCK)) -> None:
    """Raise ValueError unless the shape of the scales fits the weight and its blocks."""
    *outer, rows, columns = weight if len(weight) > 1 else (1, *weight)
    down, across = block
    expected = (*outer, -(-rows // (down or rows or 1)), -(-columns // (across or columns or 1)))
    short = {expected[:-1]} if across == 0 else set()  # [O] is accepted for [O, 1]
    short |= {(), (1,)} if block == (0, 0) else set()
    if len(weight) < 2 or scales not in {expected, *short}:
        size = " x ".join(str(each or "all") for each in block)
        raise ValueError(
            f"a weight {weight} in blocks of {size} requires scales {expected}, not {scales}"
        )


def scaled(
    weight_OI: Tensor, scales_PQ: Tensor, block: Block = (BLOCK, BLOCK),
    zeros_PQ: Tensor | None = None, dtypes: tuple[torch.dtype, ...] = (DTYPE,),
) -> Tensor:  # fmt: skip
    """Dequantise float8 or int8 values with floating-point scales [..., P, Q]. Return float32 [...,
    O, I]. Zero points of int8 values are subtracted. Raises ValueError if a shape or dtype is
    wrong."""
    check_scales(tuple(weight_OI.shape), tuple(scales_PQ.shape), block)
    if weight_OI.dtype not in dtypes or not scales_PQ.dtype.is_floating_point:
        raise ValueError(
            f"a weight with scales must be {' or '.join(map(str, dtypes))}, and the scales numbers "
            f"of floating point, not {weight_OI.dtype} and {scales_PQ.dtype}"
        )
    values_OI = weight_OI.float()
    *outer, rows, columns = values_OI.shape
    down, across = block[0] or rows, block[1] or columns
    shape = (*outer, -(-rows // max(down, 1)), -(-columns // max(across, 1)))

    def wide(each: Tensor) -> Tensor:
        return each.float().reshape(shape).repeat_interleave(across, -1)[..., :columns]

    factors_PI = wide(scales_PQ)
    if zeros_PQ is not None:
        if zeros_PQ.shape != scales_PQ.shape:
            raise ValueError(f"zero points {tuple(zeros_PQ.shape)} are not those of its scales")
        offsets_PI = wide(zeros_PQ)
    for number, part in enumerate(values_OI.split(down, -2) if values_OI.numel() else ()):
        if zeros_PQ is not None:
            part.sub_(offsets_PI[..., number, None, :])
        part.mul_(factors_PI[..., number, None, :])
    return values_OI


def form_of(
    end: str = SCALES, block_of: Callable[[Shape, Shape], Block] | None = None,
    dtypes: tuple[torch.dtype, ...] = (DTYPE,),
) -> PackedForm:  # fmt: skip
    """Return the form of 8-bit weights whose scales have the suffix ``end``. ``block_of`` returns
    the size of a block from the shapes of weight and scales. By default, blocks are 128 x 128."""

    def block(parts: StoredParts) -> Block:
        if block_of is None:
            return BLOCK, BLOCK
        return block_of(parts.shape("numbers"), parts.shape("scales"))

    def shape(parts: StoredParts) -> Shape:
        check_scales(parts.shape("numbers"), parts.shape("scales"), block(parts))
        return parts.shape("numbers")

    def unpack(parts: StoredParts) -> Tensor:
        zeros = parts.get("zero points")
        return scaled(parts["numbers"], parts["scales"], block(parts), zeros, dtypes)

    ends = {"numbers": "", "scales": end, "zero points": "_zero_point"}
    return PackedForm(ends, shape, unpack, name="", needs=("scales",))


def usual_block(weight: Shape, scales: Shape, size: Block = (BLOCK, BLOCK)) -> Block:
    """Return the rows and columns that share a scale, derived from the number of scales: the whole
    weight, one output, or else a block of ``size``."""
    if len(weight) < 2 or scales in ((), (1,)) or scales[-2:] == (1, 1):
        return 0, 0
    rows = weight[-2]
    if scales in (weight[:-1], (*weight[:-1], 1)):
        return 1, 0
    return (1, size[1]) if len(scales) > 1 and scales[-2] == rows else size
