"""Weight gradients computed after input gradients, at a time when a pipeline stage would idle.

Within :func:`products_later`, a linear layer's backward pass postpones the GEMMs for the
gradients of its parameters (W of Qi et al. 2023, arXiv:2401.10241). :func:`add_products`
computes them later.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Gradients = tuple[Tensor | None, ...]
Products = Callable[[], Gradients]
"""Function that computes the gradients of some parameters with GEMMs."""
GradientsOf = Callable[[Products], Gradients]
"""Function that returns the gradients of ``Products``, or postpones them and returns Nones."""
LaterProducts = list[tuple[tuple[nn.Parameter | None, ...], Products]]
"""Postponed gradient computations, in the order of the backward pass, each with its parameters."""

_left: LaterProducts | None = None  # shared by threads: CUDA backward passes run in other threads


@contextmanager
def products_later(left: LaterProducts) -> Iterator[None]:
    """In this context, the backward passes of linear layers append their weight gradients' GEMMs to
    ``left``, for :func:`add_products`. Their forward passes, and passes that recompute activations,
    must be inside the context too, because they prepare this."""
    global _left
    before, _left = _left, left
    try:
        yield
    finally:
        _left = before


def leaves_products() -> bool:
    """Return whether a :func:`products_later` context is active."""
    return _left is not None


def compute_now(compute: Products) -> Gradients:
    """Compute gradients immediately, within their backward pass."""
    return compute()


def now_or_later(*params: Tensor | None) -> tuple[GradientsOf, Gradients]:
    """Return the function to which a backward pass hands the GEMMs for these parameters' gradients,
    and the tensors to give to the autograd function instead of the parameters. If GEMMs are
    postponed, the gradients are None and the parameters' hooks do not run in this pass. Nothing is
    postponed if one of ``params`` is not a parameter itself, but for example a copy."""
    left, parameters = _left, tuple(p for p in params if p is None or isinstance(p, nn.Parameter))
    if left is None or len(parameters) < len(params):
        return compute_now, params

    def leave(compute: Products) -> Gradients:
        left.append((parameters, compute))
        return (None,) * len(params)

    return leave, tuple(
        p if p is None else p.detach().requires_grad_(p.requires_grad) for p in params
    )


@torch.no_grad()
def add_products(left: LaterProducts) -> None:
    """Compute the postponed gradients and add them to the parameters'. This runs a backward pass
    from the parameters, so that their hooks run as after a complete pass. The gradients of a
    parameter that is used several times are summed first, in the order of use, as autograd does."""
    uses = Counter(id(p) for params, _ in left for p in params if p is not None and p.requires_grad)
    sums: dict[int, Tensor] = {}
    for params, compute in left:
        for param, grad in zip(params, compute(), strict=True):
            if param is None or not param.requires_grad:
                continue
            key = id(param)
            uses[key] -= 1
            if grad is not None:
                sums[key] = sums.pop(key) + grad if key in sums else grad
            if uses[key]:
                continue
            if key in sums:
                torch.autograd.backward(param, sums.pop(key))
            else:  # already added to their sum by the GEMM that computed them
                for hook in list((param._post_accumulate_grad_hooks or {}).values()):
                    hook(param)
    left.clear()
