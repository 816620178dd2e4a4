"""FLOPs of the products with weights, from the shapes that a trace holds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megatron.profiling.categories import PRODUCTS
from megatron.profiling.trace import Event
from megatron.profiling.work import Work

Shape = tuple[int, int, int]
"""(m, k, n) of a product [m, k] x [k, n]."""


@dataclass(frozen=True)
class Product:
    """All products of a step of one shape in one phase: [m, k] x [k, n].

    Attributes:
        shape: (m, k, n).
        phase: phase of the step.
        calls: calls in a step.
        time: microseconds in a step.
        flops: floating-point operations in a step, two per multiply-add.
    """

    shape: Shape
    phase: str
    calls: float
    time: float
    flops: float


_FACTORS = {
    "aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::_addmm_activation": (1, 2),
    "aten::_scaled_mm": (0, 1), "aten::_int_mm": (0, 1),
}  # fmt: skip
"""Which inputs are the factors [m, k] and [k, n]."""
_LINEAR = {"mkldnn::_linear_pointwise": (0, 1), "aten::mkldnn_linear": (0, 1)}
"""Which inputs are [..., k] and the weight [n, k]."""


def product_shape(event: Event) -> Shape | None:
    """(m, k, n) of an operator's product; None if it is none, or the trace has no shapes."""
    dims: list[Any] = event.args.get("Input Dims") or []
    for table, transposed in ((_FACTORS, False), (_LINEAR, True)):
        if event.name in table:
            first, second = table[event.name]
            if len(dims) <= second or len(dims[first]) < 2 or len(dims[second]) != 2:
                return None
            *rows, k = dims[first]
            return math.prod(rows), k, dims[second][0 if transposed else 1]
    return None


def products(work: Iterable[Work], steps: int) -> list[Product]:
    """Products of the mean step, those that take most time first.

    Args:
        work: pieces of the steps; on a device kernels with the operators that started them.
        steps: number of steps that they are of.
    """
    times: dict[tuple[Shape, str], float] = defaultdict(float)
    calls: dict[tuple[Shape, str], int] = defaultdict(int)
    launched: set[int] = set()
    for piece in work:
        segment = piece.segment
        if segment is None or segment.place.category != PRODUCTS:
            continue
        shape = product_shape(segment.event)
        if shape is None:
            continue
        begins = piece.begins
        if piece.name != segment.event.name:
            # One operator may start several kernels.
            begins = id(segment.event) not in launched
            launched.add(id(segment.event))
        times[shape, piece.phase] += piece.time
        calls[shape, piece.phase] += begins
    found = []
    for (shape, phase), time in times.items():
        count = calls[shape, phase] / steps
        flops = 2.0 * math.prod(shape) * count
        found.append(Product(shape, phase, count, time / steps, flops))
    return sorted(found, key=lambda each: -each.time)
