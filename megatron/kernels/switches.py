"""Operators that run, by name: a table for measurements, not for users."""

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
"""Operators by name, and whether they run where they can. Compiled blocks depend on the values that
they read: after a change they are compiled again."""

DTYPES = torch.bfloat16, torch.float16, torch.float32
"""Dtypes of what kernels read and write; they compute in float32."""


def uses(name: str, x: Tensor) -> bool:
    """Return True if the operator called ``name`` is to process ``x``: it is on a GPU, has a dtype
    that kernels compute with, Triton can build code for it, and :data:`SWITCHES` allows it."""
    if not x.is_cuda or not SWITCHES[name] or x.dtype not in DTYPES:
        return False
    # Whoever traces has a compiler; the search for one cannot be traced.
    return torch.compiler.is_compiling() or missing_compiler("cuda") is None


@contextmanager
def switched(**values: bool) -> Iterator[None]:
    """Sets entries of :data:`SWITCHES` inside of the context.

    Raises:
        KeyError: there is no switch of a name.
    """
    before = {name: SWITCHES[name] for name in values}
    SWITCHES.update(values)
    try:
        yield
    finally:
        SWITCHES.update(before)
