"""Weights quantised by bitsandbytes. LLM.int8() (arXiv:2208.07339) has int8 values with a scale for
each output. NF4 and FP4 (arXiv:2305.14314) have 4-bit indices into a table of 16 values, with a
scale for each block; the scales may be quantised too.

Shapes: O outputs, I inputs; N elements of a weight, B blocks of elements.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.formats.huggingface.packed.form import (
    PackedForm,
    Shape,
    StoredParts,
    elements,
    matrix,
    require,
)
from megatron.util.json_text import parse_json

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_STATE = ".weight.quant_state.bitsandbytes__"
_LONGEST_STATE = 2**14
_SHARE = 0.007874015718698502
"""1 / 127, as rounded by bitsandbytes."""


def _int8_shape(parts: StoredParts) -> Shape:
    shape = matrix(parts.shape("numbers"), "weight")
    require(parts.shape("scales"), shape[:1], "SCB")
    return shape


def _int8(parts: StoredParts) -> Tensor:
    _int8_shape(parts)
    numbers, scales = parts["numbers"], parts["scales"]
    if numbers.dtype != torch.int8 or not scales.dtype.is_floating_point:
        raise ValueError(
            f"its numbers must be int8, not {numbers.dtype}, and its SCB floating point"
        )
    if "order" in parts and parts["order"].numel() and int(parts["order"].flatten()[0]) != 0:
        raise ValueError("its weight_format is not that of rows (0)")
    return numbers * scales.float().view(-1, 1) * _SHARE


INT8 = PackedForm(
    {"numbers": ".weight", "scales": ".SCB", "order": ".weight_format"}, _int8_shape, _int8,
    needs=("scales",),
)  # fmt: skip


def _state(parts: StoredParts) -> dict[str, Any]:
    """Return the JSON object that describes a quantised weight. Raises ValueError if it is
    malformed."""
    stored = parts["state"]
    if stored.dtype != torch.uint8 or stored.dim() != 1 or stored.numel() > _LONGEST_STATE:
        raise ValueError("its quant_state must be the bytes of a JSON object")
    content = parse_json(bytes(stored.tolist()), "its quant_state")
    sizes = content.get("shape") if isinstance(content, dict) else None
    blocks = [content.get("blocksize"), content.get("nested_blocksize", 1)] if sizes else []
    if (
        not isinstance(sizes, list)
        or not all(type(size) is int and size >= 0 for size in (*sizes, *blocks))
        or 0 in blocks
        or content.get("dtype") not in _DTYPES
        or not isinstance(content.get("nested_offset", 0.0), float | int)
    ):
        raise ValueError("its quant_state must have a shape, a blocksize and a dtype")
    return content


def _four_shape(parts: StoredParts) -> Shape:
    state = _state(parts)
    shape = tuple(state["shape"])
    count = elements(shape)
    require(parts.shape("numbers"), (-(-count // 2), 1), "numbers")
    blocks = -(-count // state["blocksize"])
    require(parts.shape("scales"), (blocks,), "absmax")
    require(parts.shape("table"), (16,), "quant_map")
    if "nested scales" in parts:
        nested = -(-blocks // state.get("nested_blocksize", 256))
        require(parts.shape("nested scales"), (nested,), "nested_absmax")
        require(parts.shape("nested table"), (256,), "nested_quant_map")
    return shape


def _four(parts: StoredParts) -> Tensor:
    shape, state = _four_shape(parts), _state(parts)
    numbers, scales_B = parts["numbers"], parts["scales"]
    if numbers.dtype != torch.uint8:
        raise ValueError(f"its numbers must be uint8, not {numbers.dtype}")
    if "nested scales" in parts:
        if scales_B.dtype != torch.uint8:
            raise ValueError(f"its absmax must be uint8, not {scales_B.dtype}")
        size = state.get("nested_blocksize", 256)
        wide = parts["nested scales"].float().repeat_interleave(size)[: len(scales_B)]
        scales_B = parts["nested table"].float()[scales_B.int()] * wide
        scales_B = scales_B + float(state.get("nested_offset", 0.0))
    if not scales_B.dtype.is_floating_point:
        raise ValueError(f"its absmax must be numbers of floating point, not {scales_B.dtype}")
    table, count = parts["table"].float(), elements(shape)
    flat = numbers.flatten()
    pairs = torch.stack([flat >> 4, flat & 15], dim=1).flatten()[:count]
    values_N = table[pairs.int()]
    factors_N = scales_B.float().repeat_interleave(state["blocksize"])[:count]
    return (values_N * factors_N).to(_DTYPES[state["dtype"]]).reshape(shape)


def four_bits(kind: str) -> PackedForm:
    """Return the form of 4-bit weights; ``kind`` is ``nf4`` or ``fp4``."""
    return PackedForm(
        {"numbers": ".weight", "state": f"{_STATE}{kind}", "scales": ".weight.absmax",
         "table": ".weight.quant_map", "nested scales": ".weight.nested_absmax",
         "nested table": ".weight.nested_quant_map"},
        _four_shape, _four, needs=("state",),
    )  # fmt: skip
