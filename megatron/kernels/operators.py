"""Registration of operators with two bodies, ``torch.ops.megatron.NAME``."""

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
    """Registers ``torch.ops.megatron.NAME`` and returns it. Compilers call it as it is, without a
    graph break. All callables but ``save`` and ``backward`` have the arguments of the schema, and
    return new tensors or what they mutate, never an argument or a view of one.

    Args:
        schema: name, arguments and results, as ``"double(Tensor x) -> Tensor"``;
            ``Tensor(a!) x`` is an argument that the bodies mutate. Autograd's version counter does
            not notice that: such an argument must not be saved for a backward pass.
        formula: the body in torch, for CPUs, and where the kernel cannot run.
        shapes: results without values (``torch.empty_like``), with the strides that both bodies
            give them.
        kernel: the body for GPUs. It imports its Triton source itself. It gets tensors of
            :data:`~megatron.kernels.switches.DTYPES` (others, as indices, next to them).
        save: keeps in ``ctx``, from ``(ctx, inputs, output)``, what ``backward`` needs.
        backward: gradients of all arguments from ``(ctx, *gradients of the results)``; without it
            the operator has none.
        tags: of the operator, next to ``pt2_compliant_tag``.
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
    """True if a kernel computes with all floating-point arguments, and can be built."""
    floats = [x for x in args if isinstance(x, Tensor) and x.is_floating_point()]
    return all(x.dtype in DTYPES for x in floats) and missing_compiler("cuda") is None
