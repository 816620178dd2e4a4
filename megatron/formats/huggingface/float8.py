"""Weights in 8 bits with a scale for each block of 128 x 128, as DeepSeek-V3 is published
(arXiv:2412.19437, section 3.3.2; README_WEIGHTS.md of its repository).

A tensor ``NAME`` is two in the files: ``NAME``, float8 numbers of four exponent and three mantissa
bits, and ``NAME_scale_inv``, the factor of the numbers of each block. Blocks at the lower and at
the right edge are smaller where a size is no multiple of 128.

Shapes: O outputs, I inputs, P = O / 128 and Q = I / 128 blocks, rounded up; further sizes, as of
experts, may come first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.formats.huggingface.config_reader import HFConfigReader

SCALES = "_scale_inv"
"""End of the name of the second tensor."""
BLOCK = 128
"""Rows and columns of a block."""
DTYPE = torch.float8_e4m3fn


def check_scales(weight: tuple[int, ...], scales: tuple[int, ...]) -> None:
    """Raise ValueError for scales of another shape than a weight has."""
    *outer, rows, columns = weight if len(weight) > 1 else (1, *weight)
    expected = (*outer, -(-rows // BLOCK), -(-columns // BLOCK))
    if len(weight) < 2 or scales != expected:
        raise ValueError(
            f"a weight {weight} in blocks of {BLOCK} x {BLOCK} requires scales {expected}, not "
            f"{scales}"
        )


def scaled(weight_OI: Tensor, scales_PQ: Tensor) -> Tensor:
    """The numbers [..., O, I] in float32, from float8 numbers and scales [..., P, Q] of any dtype
    of floating point. Raises ValueError for other dtypes and shapes."""
    check_scales(tuple(weight_OI.shape), tuple(scales_PQ.shape))
    if weight_OI.dtype != DTYPE or not scales_PQ.dtype.is_floating_point:
        raise ValueError(
            f"a weight with scales must be {DTYPE}, and the scales numbers of floating point, not "
            f"{weight_OI.dtype} and {scales_PQ.dtype}"
        )
    values_OI = weight_OI.float()
    factors_PI = scales_PQ.float().repeat_interleave(BLOCK, -1)[..., : values_OI.shape[-1]]
    for number, rows in enumerate(values_OI.split(BLOCK, -2)):
        rows.mul_(factors_PI[..., number, None, :])
    return values_OI


def check_quantization(given: HFConfigReader) -> None:
    """Accepts the ``quantization_config`` of such files, and leaves other methods alone. Raises
    CheckpointError for other blocks."""
    form = given.content.get("quantization_config")
    if not isinstance(form, dict) or form.get("quant_method") != "fp8":
        return
    given.unused("quantization_config")
    if form.get("weight_block_size", [BLOCK, BLOCK]) != [BLOCK, BLOCK]:
        why = f"of fp8 only scales of blocks (weight_block_size [{BLOCK}, {BLOCK}]) are read"
        given.refuse("quantization_config", form, why)
