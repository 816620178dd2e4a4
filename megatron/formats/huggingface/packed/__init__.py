"""Quantised weights in Hugging Face folders, dequantised on reading. The ``quantization_config`` in
config.json determines how they are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.files import CheckpointError
from megatron.formats.huggingface.config_reader import HFConfigReader
from megatron.formats.huggingface.packed.bitsandbytes import INT8, four_bits
from megatron.formats.huggingface.packed.float8 import BLOCK, SCALES, Block, form_of, usual_block
from megatron.formats.huggingface.packed.form import PackedForm, Shape
from megatron.formats.huggingface.packed.integers import BITS, awq, gptq, packed
from megatron.formats.huggingface.packed.mxfp4 import MXFP4

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Packing:
    """The forms in which a folder may store weights. ``ignored`` are suffixes of tensors that
    quantise activations, which are not read."""

    forms: tuple[PackedForm, ...]
    ignored: tuple[str, ...] = ()


PLAIN = Packing((MXFP4, form_of()))
"""Forms that are recognised by tensor names, without a ``quantization_config``."""
_ACTIVATIONS = (
    ".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point", ".k_scale",
    ".v_scale", ".q_scale", ".activation_scale", ".input_scale_ub", ".weight_observer",
)  # fmt: skip


def _size(config: Config, key: str = "group_size") -> int | None:
    """Return the number of inputs per group, or None if all inputs are in one group."""
    size = config.get(key)
    if size in (None, -1):
        return None
    if type(size) is not int or size < 1:
        raise ValueError(f"{key} {size!r:.50} is not a size")
    return size


def _block(config: Config, key: str) -> Block:
    block = config.get(key) or [BLOCK, BLOCK]
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(type(size) is int and size > 0 for size in block)
    ):
        raise ValueError(f"{key} {block!r:.50} is not two sizes")
    return block[0], block[1]


def _fp8(config: Config) -> Packing:
    block = partial(usual_block, size=_block(config, "weight_block_size"))
    if config.get("fmt", "e4m3") != "e4m3":
        raise ValueError(f"fmt {config['fmt']!r:.50} is not e4m3")
    return Packing((form_of(SCALES, block), form_of("_scale", block)), _ACTIVATIONS)


def _fbgemm(config: Config) -> Packing:
    return Packing((form_of("_scale", usual_block),), _ACTIVATIONS)


def _gptq(config: Config) -> Packing:
    bits, version = config.get("bits"), config.get("checkpoint_format", "gptq")
    if bits not in BITS:
        raise ValueError(f"bits {bits!r:.50} must be one of {BITS}")
    if version not in ("gptq", "gptq_v2"):
        raise ValueError(f"checkpoint_format {version!r:.50} must be gptq or gptq_v2")
    return Packing((gptq(bits, int(version == "gptq"), _size(config)),))


def _awq(config: Config) -> Packing:
    bits, version = config.get("bits", config.get("w_bit")), config.get("version", "gemm")
    if bits != 4 or str(version).lower() != "gemm":
        raise ValueError(
            f"bits {bits!r:.50}, version {version!r:.50}: only 4 bits in gemm are read"
        )
    return Packing(
        (awq(_size(config, "group_size" if "group_size" in config else "q_group_size")),)
    )


def _bitsandbytes(config: Config) -> Packing:
    return Packing((INT8, four_bits("nf4"), four_bits("fp4")))


_COMPRESSED = {"float-quantized", "int-quantized", "naive-quantized", "pack-quantized"}


def _compressed(config: Config) -> Packing:
    groups = config.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    schemes: list[Any] = [each.get("weights") for each in groups if isinstance(each, dict)]
    named = [config.get("format"), *(g.get("format") for g in groups if isinstance(g, dict))]
    kinds = {str(form) for form in named if form not in (None, "mixed-precision")}
    if not schemes or not all(isinstance(each, dict) for each in schemes):
        raise ValueError("config_groups with weights are missing")
    if not kinds or not kinds <= _COMPRESSED:
        raise ValueError(f"format {', '.join(sorted(kinds))} must be one of "
                         f"{', '.join(sorted(_COMPRESSED))}")  # fmt: skip
    for key in ("transform_config", "sparsity_config"):
        inner = config.get(key)
        plain = isinstance(inner, dict) and inner.get("format", "dense") == "dense"
        if inner and not (key == "sparsity_config" and plain):
            raise ValueError(f"{key} {inner!r:.100} is not read")
    sizes = {_size(each) for each in schemes} - {None}
    blocks = {_block(each, "block_structure") for each in schemes}
    stored = [each.get("num_bits") for each in schemes if each.get("type") == "int"]
    bits = {number if type(number) is int else None for number in stored}
    if len(sizes) > 1 or len(blocks) > 1 or "pack-quantized" in kinds and len(bits) != 1:
        raise ValueError("groups of weights with several group sizes, blocks or bits are not read")
    size = next(iter(sizes), None)

    def block(weight: Shape, scales: Shape) -> Block:
        down, across = next(iter(blocks))
        return usual_block(weight, scales, (down, size or across))

    forms = [form_of("_scale", block, (torch.float8_e4m3fn, torch.int8))]
    if "pack-quantized" in kinds:
        (number,) = bits
        if number not in BITS:
            raise ValueError(f"num_bits {number!r:.50} must be one of {BITS}")

        def of_group(inputs: int, count: int) -> int:
            return inputs if count == 1 or size is None else size

        forms.insert(0, packed(number, of_group))
    return Packing(tuple(forms), _ACTIVATIONS)


_METHODS: dict[str, Callable[[Config], Packing]] = {
    "fp8": _fp8, "fbgemm_fp8": _fbgemm, "gptq": _gptq, "awq": _awq, "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed, "mxfp4": lambda _: PLAIN,
}  # fmt: skip


def packing_of(content: Mapping[str, Any], path: Path) -> Packing:
    """Return how the weights next to the config.json at ``path`` are packed. Raises CheckpointError
    for an unsupported variant of a supported method."""
    config = content.get("quantization_config")
    if not isinstance(config, dict):
        return PLAIN
    method = _method(config)
    try:
        return _METHODS[method](config) if method in _METHODS else PLAIN
    except ValueError as error:
        raise CheckpointError(f"{path}: quantization_config ({method}): {error}") from None


def _method(config: Config) -> str:
    """Return the quantisation method. Older bitsandbytes files do not name it."""
    by_bits = config.get("load_in_8bit") or config.get("load_in_4bit")
    return str(config.get("quant_method") or ("bitsandbytes" if by_bits else None))


def check_quantization(given: HFConfigReader) -> None:
    """Mark the ``quantization_config`` as read. Raises CheckpointError if its method is not
    supported."""
    config = given.content.get("quantization_config")
    if not isinstance(config, dict) or not config:
        return
    if _method(config) not in _METHODS:
        why = f"quantised weights of {_method(config)} are not read here; those of "
        given.refuse("quantization_config", config, f"{why}{', '.join(sorted(_METHODS))} are")
    given.unused("quantization_config")
