"""Switches for operators, by name. They are for measurements rather than for users."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron.kernels.compiler import missing_compiler

SWITCHES: dict[str, bool] = {
    "swiglu": True,
    "rope": True,
    "sums": True,
    "casts": True,
}
"""Switches of the operators, by name. Compiled code depends on these values, and is recompiled when
they change."""

DTYPES = torch.bfloat16, torch.float16, torch.float32
"""Dtypes that kernels read and write. They compute in float32."""


def uses(name: str, x: Tensor) -> bool:
    """Return whether the operator ``name`` handles ``x``: ``x`` must be on a GPU, in one of the
    kernels' dtypes, Triton must be usable, and :data:`SWITCHES` must enable the operator."""
    if not x.is_cuda or not SWITCHES[name] or x.dtype not in DTYPES:
        return False
    # While tracing, a compiler certainly exists, and the check for one could not be traced.
    return torch.compiler.is_compiling() or missing_compiler("cuda") is None


@contextmanager
def switched(**values: bool) -> Iterator[None]:
    """Set entries of :data:`SWITCHES` inside the context. Raises KeyError if a name is unknown."""
    before = {name: SWITCHES[name] for name in values}
    SWITCHES.update(values)
    try:
        yield
    finally:
        SWITCHES.update(before)
