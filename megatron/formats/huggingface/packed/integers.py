"""Low-bit integer weights with a scale for each group of inputs: GPTQ (arXiv:2210.17323, files of
AutoGPTQ and GPTQModel), AWQ (arXiv:2306.00978, AutoAWQ's GEMM layout), and the packed integers of
compressed-tensors. A weight is (integer - zero point) * scale.

Shapes: O outputs, I inputs, G groups of inputs; W = 32 / bits integers in an int32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megatron.formats.huggingface.packed.form import (
    PackedForm,
    Shape,
    StoredParts,
    elements,
    groups_of,
    matrix,
    require,
    unpacked_bits,
)

BITS = (2, 4, 8)
"""Supported bit widths, which divide 32."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position in an int32 of each of eight consecutive values."""


def _dequantised(
    numbers_IO: Tensor, zeros_GO: Tensor, scales_GO: Tensor, groups_I: Tensor
) -> Tensor:
    """Dequantise a weight to float32 [O, I]. The result is exact for float16 scales."""
    if not scales_GO.dtype.is_floating_point:
        raise ValueError(f"its scales must be numbers of floating point, not {scales_GO.dtype}")
    values_IO = numbers_IO.float()
    values_IO -= zeros_GO.float()[groups_I]
    values_IO *= scales_GO.float()[groups_I]
    return values_IO.mT.contiguous()


def _gptq_shape(bits: int, parts: StoredParts) -> Shape:
    rows, outputs = matrix(parts.shape("numbers"), "qweight")
    inputs, (groups, _) = rows * 32 // bits, matrix(parts.shape("scales"), "scales")
    require(parts.shape("scales"), (groups, outputs), "scales")
    require(parts.shape("zero points"), (groups, -(-outputs * bits // 32)), "qzeros")
    if "groups" in parts:
        require(parts.shape("groups"), (inputs,), "g_idx")
    return outputs, inputs


def _gptq(bits: int, added: int, size: int | None, parts: StoredParts) -> Tensor:
    outputs, inputs = _gptq_shape(bits, parts)
    numbers_IO = unpacked_bits(parts["numbers"], bits, 0)
    zeros_GO = unpacked_bits(parts["zero points"], bits, 1)[:, :outputs]
    zeros_GO = zeros_GO + added & (1 << bits) - 1
    scales_GO, index = parts["scales"], parts.get("groups")
    groups_I = groups_of(inputs, scales_GO.shape[0], index, size)
    return _dequantised(numbers_IO, zeros_GO, scales_GO, groups_I)


def gptq(bits: int, added: int, size: int | None) -> PackedForm:
    """Return GPTQ's form. ``added`` is 1 for files that store zero points minus one (all but
    ``gptq_v2``). Groups have ``size`` inputs, or are listed in ``g_idx``; None means one group."""
    ends = {
        "numbers": ".qweight",
        "zero points": ".qzeros",
        "scales": ".scales",
        "groups": ".g_idx",
    }
    return PackedForm(ends, partial(_gptq_shape, bits), partial(_gptq, bits, added, size))


def _awq_shape(parts: StoredParts) -> Shape:
    inputs, columns = matrix(parts.shape("numbers"), "qweight")
    groups, _ = matrix(parts.shape("scales"), "scales")
    require(parts.shape("scales"), (groups, columns * 8), "scales")
    if "zero points" in parts:
        require(parts.shape("zero points"), (groups, columns), "qzeros")
    return columns * 8, inputs


def _awq_numbers(packed: Tensor) -> Tensor:
    numbers = unpacked_bits(packed, 4, 1)
    return numbers.unflatten(1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(1)


def _awq(size: int | None, parts: StoredParts) -> Tensor:
    _, inputs = _awq_shape(parts)
    scales_GO = parts["scales"]
    zeros_GO = (
        _awq_numbers(parts["zero points"])
        if "zero points" in parts
        else torch.full(scales_GO.shape, 8)
    )
    groups_I = groups_of(inputs, scales_GO.shape[0], None, size)
    return _dequantised(_awq_numbers(parts["numbers"]), zeros_GO, scales_GO, groups_I)


def awq(size: int | None) -> PackedForm:
    """Return AWQ's 4-bit form. ``size`` is the number of inputs per group; None means one group."""
    ends = {"numbers": ".qweight", "scales": ".scales", "zero points": ".qzeros"}
    return PackedForm(ends, _awq_shape, partial(_awq, size))


def _packed_shape(bits: int, parts: StoredParts) -> Shape:
    stored = parts["shape"]
    if stored.dtype.is_floating_point or stored.dim() != 1 or stored.numel() != 2:
        raise ValueError(
            f"its shape must be two integers, not {stored.dtype} {tuple(stored.shape)}"
        )
    outputs, inputs = shape = tuple(int(size) for size in stored)
    elements(shape)
    require(parts.shape("numbers"), (outputs, -(-inputs * bits // 32)), "packed numbers")
    scales = parts.shape("scales")
    if scales != (1,):
        require(scales[:1], (outputs,), "scales")
        matrix(scales, "scales")
    if "zero points" in parts:
        groups = scales[1] if len(scales) > 1 else 1
        require(parts.shape("zero points"), (-(-outputs * bits // 32), groups), "zero points")
    return outputs, inputs


def _packed(bits: int, size: Callable[[int, int], int], parts: StoredParts) -> Tensor:
    outputs, inputs = _packed_shape(bits, parts)
    scales_OG = parts["scales"].reshape(-1, parts["scales"].shape[-1]).expand(outputs, -1)
    groups, middle = scales_OG.shape[1], 1 << bits - 1
    numbers_IO = unpacked_bits(parts["numbers"], bits, 1)[:, :inputs].mT - middle
    zeros_OG = torch.zeros_like(scales_OG)
    if "zero points" in parts:
        zeros_OG = unpacked_bits(parts["zero points"], bits, 0)[:outputs] - middle
    index = parts.get("groups")
    groups_I = groups_of(inputs, groups, index, size(inputs, groups))
    return _dequantised(numbers_IO, zeros_OG.mT, scales_OG.mT, groups_I)


def packed(bits: int, size: Callable[[int, int], int]) -> PackedForm:
    """Return the form for compressed-tensors' pack-quantized format. ``size`` returns the number of
    inputs per group, given the number of inputs and the number of groups."""
    ends = {"numbers": ".weight_packed", "shape": ".weight_shape", "scales": ".weight_scale",
            "zero points": ".weight_zero_point", "groups": ".weight_g_idx"}  # fmt: skip
    return PackedForm(ends, partial(_packed_shape, bits), partial(_packed, bits, size))
