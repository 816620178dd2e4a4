"""Weights in MXFP4, the dtype in which gpt-oss is published: 4-bit values in blocks of 32 with one
scale each (OCP Microscaling Formats specification 1.0, sections 5.3.3, 5.4.1 and 6.3).

A weight ``NAME`` is stored as two tensors. ``NAME_blocks`` has two values per byte, the first in
the lower four bits. ``NAME_scales`` has one byte e for each block, whose scale is 2^(e - 127). The
tensors have a row for each output; in `transformers` such weights are transposed.

Shapes: E matrices, O outputs, I inputs, G = I / 32 blocks per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.formats.huggingface.config_reader import HFConfigReader
from megatron.formats.huggingface.packed.form import PackedForm, Shape, StoredParts

BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the names of the two tensors."""
BLOCK = 32
"""Number of values per block."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = torch.tensor([*_MAGNITUDES, *(-number for number in _MAGNITUDES)])
"""Value of each 4-bit code, whose highest bit is the sign."""
_PAIRS = torch.stack([_NUMBERS.repeat(16), _NUMBERS.repeat_interleave(16)], dim=1)
"""The two values of each byte, [256, 2]."""
_SCALES = torch.tensor([*(2.0 ** (e - 127) for e in range(255)), torch.nan])


def _shape(parts: StoredParts) -> Shape:
    """Return a weight's shape [E, I, O], derived from the shape of its blocks."""
    shape = parts.shape("blocks")
    if len(shape) != 4:
        return tuple(_unpack(parts).shape)
    matrices, outputs, groups, _ = shape
    return matrices, groups * BLOCK, outputs


def unpacked(blocks_EOGB: Tensor, scales_EOG: Tensor) -> Tensor:
    """Dequantise bytes [E, O, G, 16] with scales [E, O, G] to bfloat16 [E, I, O]. The result is
    exact except below 2^-133. Raises ValueError if a shape or dtype is wrong."""
    shape = tuple(blocks_EOGB.shape)
    fits = len(shape) == 4 and shape[3] == BLOCK // 2 and shape[:3] == tuple(scales_EOG.shape)
    if not fits or {blocks_EOGB.dtype, scales_EOG.dtype} != {torch.uint8}:
        raise ValueError(
            f"MXFP4 requires blocks [matrices, rows, groups, {BLOCK // 2}] and a scale for each, "
            f"both uint8, not {shape} {blocks_EOGB.dtype} and {tuple(scales_EOG.shape)} "
            f"{scales_EOG.dtype}"
        )
    values_EOI = torch.empty(*shape[:2], shape[2] * BLOCK, dtype=torch.bfloat16)
    # One matrix at a time, since the table indices take eight times the memory of the values.
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
    """Mark MXFP4's ``quantization_config`` as read. Raises CheckpointError for other methods."""
    method = given.table("quantization_config").get("quant_method", "mxfp4")
    if method != "mxfp4":
        given.refuse("quantization_config", method, "of quantised weights only mxfp4 is read")
