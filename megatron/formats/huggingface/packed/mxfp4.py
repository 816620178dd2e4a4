"""Weights in MXFP4, as gpt-oss is published: 4-bit numbers in blocks of 32 with a scale each (OCP
Microscaling Formats specification 1.0, sections 5.3.3, 5.4.1 and 6.3).

A tensor ``NAME`` is two in the files: ``NAME_blocks``, bytes of two numbers each, the lower four
bits first, and ``NAME_scales``, a byte e for each block, whose scale is 2^(e - 127). Both have a
row for each output of a matrix product; `transformers` has such weights the other way round.

Shapes: E matrices, O outputs, I inputs, G = I / 32 blocks of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.formats.huggingface.config_reader import HFConfigReader
from megatron.formats.huggingface.packed.form import PackedForm, Shape, StoredParts

BLOCKS, SCALES = "_blocks", "_scales"
"""Ends of the names of the two tensors."""
BLOCK = 32
"""Numbers of a block."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = torch.tensor([*_MAGNITUDES, *(-number for number in _MAGNITUDES)])
"""By their four bits, the sign first."""
_PAIRS = torch.stack([_NUMBERS.repeat(16), _NUMBERS.repeat_interleave(16)], dim=1)
"""Two numbers by their byte, [256, 2]."""
_SCALES = torch.tensor([*(2.0 ** (e - 127) for e in range(255)), torch.nan])


def _shape(parts: StoredParts) -> Shape:
    """[E, I, O], the shape of a tensor, from the shape of its blocks."""
    shape = parts.shape("blocks")
    if len(shape) != 4:
        return tuple(_unpack(parts).shape)
    matrices, outputs, groups, _ = shape
    return matrices, groups * BLOCK, outputs


def unpacked(blocks_EOGB: Tensor, scales_EOG: Tensor) -> Tensor:
    """Return the numbers [E, I, O] in bfloat16, which is exact except below 2^-133, from bytes [E,
    O, G, 16] and [E, O, G]. Raises ValueError for other tensors."""
    shape = tuple(blocks_EOGB.shape)
    fits = len(shape) == 4 and shape[3] == BLOCK // 2 and shape[:3] == tuple(scales_EOG.shape)
    if not fits or {blocks_EOGB.dtype, scales_EOG.dtype} != {torch.uint8}:
        raise ValueError(
            f"MXFP4 requires blocks [matrices, rows, groups, {BLOCK // 2}] and a scale for each, "
            f"both uint8, not {shape} {blocks_EOGB.dtype} and {tuple(scales_EOG.shape)} "
            f"{scales_EOG.dtype}"
        )
    values_EOI = torch.empty(*shape[:2], shape[2] * BLOCK, dtype=torch.bfloat16)
    # One matrix at a time: places in a table take eight times the memory of the numbers.
    for blocks_OGB, scales_OG, values_OI in zip(blocks_EOGB, scales_EOG, values_EOI, strict=True):
        numbers_OGB = _PAIRS[blocks_OGB.int()].flatten(2)
        values_OI.copy_((numbers_OGB * _SCALES[scales_OG.int()].unsqueeze(2)).flatten(1))
    return values_EOI.mT


def _unpack(parts: StoredParts) -> Tensor:
    return unpacked(parts["blocks"], parts["scales"])


MXFP4 = PackedForm(
    {"blocks": BLOCKS, "scales": SCALES}, _shape, _unpack, name="", needs=("scales",),
    dtype=torch.bfloat16,
)  # fmt: skip


def check_quantization(given: HFConfigReader) -> None:
    """Accept the ``quantization_config`` of such files. Raises CheckpointError for others."""
    method = given.table("quantization_config").get("quant_method", "mxfp4")
    if method != "mxfp4":
        given.refuse("quantization_config", method, "of quantised weights only mxfp4 is read")
