"""Weights in the layout that oneDNN's kernels read, for CPUs.

Products of few rows, as of generated tokens, take about half the time (benchmarks/RESULTS.md). The
weights are there a second time, since embeddings and evaluations read them too. Numbers differ from
those of other kernels by their rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

LEAST = 2**16
"""Numbers of a weight from which it is packed: calling the kernel takes longer than others."""
SHARE = 0.25
"""Of the free memory, which packed weights may take; else none is packed."""
_ROWS = 32
"""Which the layout is chosen for."""

Product = Callable[[Tensor, Tensor], Tensor]
"""Of rows [M, I] and a weight [O, I]."""


class PackedWeights(TorchFunctionMode):
    """Within the context, products of these weights are those of their packed copies."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        chosen = [weight for weight in weights if _suits(weight)]
        size = sum(weight.untyped_storage().nbytes() for weight in chosen)
        if size > SHARE * psutil.virtual_memory().available:
            chosen = []
        # By identity; the weights themselves keep it from being another tensor's.
        self._packed = {id(weight): (weight, packed(weight)) for weight in chosen}

    def __contains__(self, weight: Tensor) -> bool:
        return id(weight) in self._packed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and id(args[1]) in self._packed and not kwargs:
            return packed_linear(args[0], self._packed[id(args[1])][1], *args[2:])
        return func(*args, **(kwargs or {}))


def _suits(weight: Tensor) -> bool:
    plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    return plain and weight.numel() >= LEAST and torch.backends.mkldnn.is_available()


@torch.inference_mode()
def packed(weight_OI: Tensor) -> Tensor:
    """The weight in oneDNN's layout, for :func:`packed_linear`."""
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach().clone(), _ROWS)


def packed_linear(x: Tensor, weight: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x A^T + b, [..., O]."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias_O, "none", [], "")
