"""Products with weights that oneDNN has laid out for them: on CPUs up to 2.5 times as fast as
F.linear where rows are few, and a row of them depends on no other row.

Shapes: R rows, I inputs, O outputs of a linear layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FEWEST_ROWS = 4
"""A product of fewer rows may round differently."""
_TRIED_ROWS = (4, 5, 16, 33, 64, 65)
_LAID_OUT_FOR = 64


class PackedWeight(nn.Parameter):
    """A weight [O, I]. Within `packed_products` F.linear multiplies by a packed copy of it, which
    the first product makes, if a trial of its shape shows that rows do not depend on other rows.
    Elsewhere it is a parameter like any other, which rounds differently."""

    active: ClassVar[bool] = False
    packed: Tensor | None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear and cls.active:
                return _linear(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))


def pack_weights(weights: Iterable[Tensor]) -> None:
    """Makes :class:`PackedWeight` of the float32 parameters on a CPU among matrices. Those that are
    multiplied by take their memory once more."""
    if not torch.backends.mkldnn.is_available():
        return
    for weight in weights:
        if weight.dim() == 2 and weight.device.type == "cpu" and weight.dtype == torch.float32:
            weight.__class__ = PackedWeight


@contextmanager
def packed_products() -> Iterator[None]:
    """Where packed weights are used; not by several threads at a time."""
    before, PackedWeight.active = PackedWeight.active, True
    try:
        yield
    finally:
        PackedWeight.active = before


def _linear(input: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    if not hasattr(weight, "packed"):
        independent = _rows_are_independent(weight.shape[1], weight.shape[0])
        weight.packed = _packed(weight.detach()) if independent else None
    if weight.packed is None or input.shape[:-1].numel() < FEWEST_ROWS:
        return F.linear(input, weight, bias)
    return _product(input, weight.packed, bias)


def _packed(weight_OI: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI, _LAID_OUT_FOR)


def _product(x: Tensor, packed: Tensor, bias_O: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias_O, "none", [], "")


@functools.cache
def _rows_are_independent(inputs: int, outputs: int) -> bool:
    """Whether the same rows give the same alone and among others, in a trial."""
    generator = torch.Generator().manual_seed(1)
    x_RI = torch.randn(max(_TRIED_ROWS), inputs, generator=generator)
    packed = _packed(torch.randn(outputs, inputs, generator=generator))
    y_RO = _product(x_RI, packed, None)
    return all(
        torch.equal(_product(x_RI[-rows:], packed, None), y_RO[-rows:]) for rows in _TRIED_ROWS
    )
