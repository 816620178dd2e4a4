"""Weights in the layout that oneDNN's kernels read, for CPUs.

Products of few rows, as of generated tokens, take about half the time of those with plain weights.
Packed weights are copies, since evaluations read the plain ones. Results differ from those of
other kernels by rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.apps.generation.execution.row_rule import independent, some_weight

LEAST = 2**18
"""Numbers of a weight from which it is packed: calling this kernel takes longer than others."""
SHARE = 0.25
"""Of the free memory, which packed weights may take; else none is packed."""
_ROWS = 64
"""Which the layout is chosen for."""


class PackedWeight(nn.Parameter):
    """A weight [O, I] whose products are those of a packed copy while this is ``active``; the first
    product makes the copy. Elsewhere it is a parameter like any other."""

    active: ClassVar[bool] = False
    copy: Tensor | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is not F.linear or not cls.active:
                return func(*args, **(kwargs or {}))
            x, weight, *bias = args
            if weight.copy is None:
                weight.copy = packed(weight)
            return packed_linear(x, weight.copy, *bias, **(kwargs or {}))


class PackedWeights:
    """Within this context products of some of the weights are those of packed copies: of float32
    matrices on CPUs, where rows do not depend on each other and there is memory for them. Not for
    several threads at a time."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        chosen = [weight for weight in weights if _suits(weight)]
        if sum(weight.nbytes for weight in chosen) > SHARE * psutil.virtual_memory().available:
            return
        for weight in chosen:
            # In its place: modules and tables hold the parameter itself.
            weight.__class__ = PackedWeight  # type: ignore[assignment]

    def __enter__(self) -> None:
        PackedWeight.active = True

    def __exit__(self, *_: object) -> None:
        PackedWeight.active = False


def is_packed(weight: Tensor) -> bool:
    """Whether there is a context that multiplies by a packed copy of it."""
    return isinstance(weight, PackedWeight)


def _suits(weight: Tensor) -> bool:
    if is_packed(weight):
        return False
    plain = (
        isinstance(weight, nn.Parameter)
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
    )
    if not plain or weight.numel() < LEAST or not torch.backends.mkldnn.is_available():
        return False
    return _independent(*weight.shape)


@functools.cache
def _independent(outputs: int, inputs: int) -> bool:
    weight = packed(some_weight(outputs, inputs, torch.float32))
    return independent(lambda x_MI: packed_linear(x_MI, weight), inputs, torch.float32)


@torch.inference_mode()
def packed(weight_OI: Tensor) -> Tensor:
    """The weight in oneDNN's layout, for :func:`packed_linear`."""
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), _ROWS)


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x A^T + b, [..., O]."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
