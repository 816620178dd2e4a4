"""Weights in the layout that oneDNN's kernels read, for CPUs.

Products of few rows, as of generated tokens, take about half the time of those with plain weights.
The weights are there a second time, since evaluations read the plain ones. Numbers differ from
those of other kernels by their rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron.inference.row_rule import independent, some_weight

LEAST = 2**16
"""Numbers of a weight from which it is packed: calling this kernel takes longer than others."""
SHARE = 0.25
"""Of the free memory, which packed weights may take; else none is packed."""
_ROWS = 64
"""Which the layout is chosen for."""


class PackedWeights(TorchFunctionMode):
    """Within the context, products of some of the weights are those of packed copies, which the
    first product makes: of float32 matrices on CPUs, where rows do not depend on each other and
    there is memory for them."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        chosen = [weight for weight in weights if _suits(weight)]
        if sum(weight.nbytes for weight in chosen) > SHARE * psutil.virtual_memory().available:
            chosen = []
        # By identity, which is unique as long as the weight is kept.
        self._weights = {id(weight): weight for weight in chosen}
        self._packed: dict[int, Tensor] = {}

    def __contains__(self, weight: Tensor) -> bool:
        return id(weight) in self._weights

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear or id(args[1]) not in self._weights:
            return func(*args, **(kwargs or {}))
        key = id(args[1])
        if key not in self._packed:
            self._packed[key] = packed(args[1])
        return packed_linear(args[0], self._packed[key], *args[2:], **(kwargs or {}))


def _suits(weight: Tensor) -> bool:
    plain = weight.device.type == "cpu" and weight.dtype == torch.float32
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
