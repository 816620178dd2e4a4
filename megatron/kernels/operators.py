"""Registration of operators with two implementations as ``torch.ops.megatron.NAME``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.compiler import missing_compiler
from megatron.kernels.switches import DTYPES

# torch.library.custom_op would import sympy when a run starts.
_LIBRARY = torch.library.Library("megatron", "FRAGMENT")


def define(
    schema: str,
    formula: Callable[..., Any],
    shapes: Callable[..., Any],
    kernel: Callable[..., Any] | None = None,
    *,
    save: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
    backward: Callable[..., Any] | None = None,
    tags: Sequence[torch.Tag] = (),
) -> Callable[..., Any]:
    """Register ``torch.ops.megatron.NAME`` and return it. Compiled code calls it without a graph
    break. All callables except ``save`` and ``backward`` have the arguments of the schema. They
    return new tensors, or arguments that they mutate, but never another argument or a view of
    one.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    _LIBRARY.impl(name, formula, "CompositeExplicitAutograd")

    def on_gpu(*args: Any) -> Any:
        return (kernel if kernel is not None and _computes(args) else formula)(*args)

    _LIBRARY.impl(name, on_gpu, "CUDA")
    operator = getattr(torch.ops.megatron, name).default
    torch.library.register_fake(operator, shapes, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(operator, backward, setup_context=save, lib=_LIBRARY)
    return operator  # type: ignore[no-any-return]


def _computes(args: Sequence[Any]) -> bool:
    """Return whether a kernel supports all floating-point arguments and can be compiled."""
    floats = [x for x in args if isinstance(x, Tensor) and x.is_floating_point()]
    return all(x.dtype in DTYPES for x in floats) and missing_compiler("cuda") is None
