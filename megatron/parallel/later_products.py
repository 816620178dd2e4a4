"""Gradients of weights that are computed after those of inputs, while a pipeline stage would wait.

Within :func:`products_later` the backward pass of a linear layer leaves the products for the
gradients of its parameters (W of Qi et al. 2023, arXiv:2401.10241), and :func:`add_products`
computes them.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Gradients = tuple[Tensor | None, ...]
Products = Callable[[], Gradients]
"""Computes the gradients of some parameters."""
GradientsOf = Callable[[Products], Gradients]
"""Returns gradients of products, or None for each and leaves them for later."""
LaterProducts = list[tuple[tuple[nn.Parameter | None, ...], Products]]
"""Products that a backward pass has left, in its order, each with its parameters."""

_left: LaterProducts | None = None  # one for all threads: CUDA's backward passes run in others


@contextmanager
def products_later(left: LaterProducts) -> Iterator[None]:
    """Within it the forward passes of linear layers prepare, and their backward passes leave in
    ``left``, the products for gradients of weights, for :func:`add_products`. Passes that recompute
    must be within it too."""
    global _left
    before, _left = _left, left
    try:
        yield
    finally:
        _left = before


def leaves_products() -> bool:
    """True within :func:`products_later`."""
    return _left is not None


def compute_now(compute: Products) -> Gradients:
    """Return gradients in the backward pass that they belong to."""
    return compute()


def now_or_later(*params: Tensor | None) -> tuple[GradientsOf, Gradients]:
    """Return what a backward pass hands its products for these parameters to, and the tensors that
    an autograd function gets in their place. Products are computed at once, or left: then hooks of
    the parameters do not run in this pass, and gradients are None. What is computed from a
    parameter, or is a copy of one, has its gradient at once."""
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
    """Compute what a backward pass has left and add it to the gradients, by a backward pass from
    the parameters, so that their hooks run as after the whole one. The gradients of a parameter
    with several uses are summed before, in the order of their uses, as autograd does."""
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
            else:  # added to their sum as they were computed
                for hook in list((param._post_accumulate_grad_hooks or {}).values()):
                    hook(param)
    left.clear()
