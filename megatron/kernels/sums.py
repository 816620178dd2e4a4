"""Gradients of weights that are added, where they are computed, to their sum over micro batches.

Autograd writes the gradient of a micro batch to memory, reads it again, and adds it to the sum. In
16 bits it rounds both. Here a GEMM adds its product to the sum, rounded once, and a table gets only
the rows that a micro batch used. A sum starts as the first gradient, without zeros before it.

Shapes: T tokens, I input, O output, V rows of a table, H their width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from megatron.kernels.operators import define
from megatron.kernels.switches import SWITCHES

PRODUCTS_ON = {"cuda"}
"""Types of devices where GEMMs add to sums. On a CPU that takes as long as a product and a sum, and
these round as autograd does."""

WORK_BYTES = 2 * 2**20
"""Size of the float32 work space on CPUs, which fits into a core's caches."""

_numbers = count()
_sums: WeakValueDictionary[int, GradientSum] = WeakValueDictionary()


class GradientSum:
    """The sum of a step's gradients of a weight: its ``grad``, which autograd may add to as well.
    After the first gradient it is elsewhere if ``total`` returns another sum. Hooks of the weight
    get the gradient of each pass as from autograd, and None from autograd itself.

    Attributes:
        key: number of this object, for :func:`add_later`. A tensor, so that one graph serves all
            blocks of a shape.
    """

    def __init__(
        self, weight: nn.Parameter, total: Callable[[], Tensor | None] | None = None
    ) -> None:
        self.weight, self._total, number = weight, total, next(_numbers)
        self._pending: Tensor | None = None
        self._in_autograd = False
        self.key = torch.tensor(number)
        _sums[number] = self
        weight.gradient_sum = self  # type: ignore[attr-defined]

    @property
    def total(self) -> Tensor | None:
        """The sum so far; None before the first gradient of a step."""
        return self.weight.grad if self._total is None else self._total()

    @property
    def hooked(self) -> bool:
        """True if a hook expects the gradient of a whole backward pass."""
        return bool(self.weight._backward_hooks)

    def start(self, grad: Tensor) -> None:
        """Take the first gradient of a step, in the weight's dtype, as the sum."""
        self.weight.grad = grad

    def add(self, grad: Tensor) -> None:
        """Add a gradient, which may become the sum."""
        for hook in list((self.weight._backward_hooks or {}).values()):
            changed = hook(grad)
            grad = grad if changed is None else changed
        total = self.total
        if total is None:
            self.start(grad.to(self.weight.dtype))
        else:
            add_wider(total, grad)

    def add_scaled(self, grad: Tensor, factor: Tensor) -> Tensor | None:
        """Add a gradient of a backward pass times a factor of one element, rounded once. Return it
        for autograd, where a hook follows that autograd calls. The gradient may be overwritten."""
        total = self.total
        if total is not None and total.is_cuda and not self.hooked:
            total.addcmul_(grad, factor)
            return None
        grad = scaled(grad, factor, self.weight.dtype)
        if self.weight._post_accumulate_grad_hooks:
            self._in_autograd = True
            return grad
        self.add_at_end(grad)
        return None

    def add_at_end(self, grad: Tensor) -> None:
        """Add a gradient at the end of the backward pass with the other ones of the pass, summed
        before, as autograd does."""
        if self._pending is not None:
            self._pending += grad
            return
        self._pending = grad
        torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)

    @torch.no_grad()
    def _end_pass(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            self.add(pending)

    def add_product(self, grad_TO: Tensor, x_TI: Tensor) -> None:
        """Add g^T x, [O, I]."""
        total = self.total
        in_backward = torch._C._current_graph_task_id() != -1
        if self.hooked and in_backward and not self.weight._post_accumulate_grad_hooks:
            self.add_at_end(grad_TO.t() @ x_TI)
        elif (
            total is None or self.hooked or not adds_products(x_TI.device, x_TI.dtype, total.dtype)
        ):
            self.add(grad_TO.t() @ x_TI)
        else:
            add_product(total, grad_TO, x_TI, 1)

    def add_rows(self, grad_TH: Tensor, rows_T: Tensor) -> Tensor | None:
        """Add gradients to the rows of a table that were used. Return the whole gradient for
        autograd, [V, H], where there is nothing to add to, or most rows are used."""
        sum_VH, in_autograd = self._pending, self._in_autograd
        self._in_autograd = False
        if sum_VH is None and not self.hooked and not in_autograd:
            sum_VH = self.total
        if sum_VH is None or 2 * len(rows_T) > len(self.weight):
            grad_VH = table_gradient(grad_TH, rows_T, len(self.weight))
            if self._pending is None:
                return grad_VH
            self._pending += grad_VH
            return None
        # Gradients of equal rows are summed first, in their order.
        sorted_T, order_T = rows_T.sort(stable=True)
        place_T = torch.zeros_like(sorted_T)
        torch.cumsum(sorted_T[1:] != sorted_T[:-1], 0, out=place_T[1:])
        places_T = torch.empty_like(order_T).scatter_(0, order_T, place_T)
        # Places without a gradient add zeros to different rows: none waits for another.
        into_T = torch.arange(len(rows_T), device=rows_T.device).scatter_(0, place_T, sorted_T)
        addend_TH = table_gradient(grad_TH, places_T, len(rows_T))
        sum_VH.index_add_(0, into_T, addend_TH.to(sum_VH.dtype))
        return None


def sum_of(weight: Tensor) -> GradientSum | None:
    """Return the sum that gradients of a weight are added to; None if autograd adds them."""
    return getattr(weight, "gradient_sum", None) if SWITCHES["sums"] else None


def key_of(weight: Tensor) -> Tensor | None:
    """Return the key of the sum that GEMMs add gradients of a weight to; None if none does."""
    place = sum_of(weight) if weight.device.type in PRODUCTS_ON else None
    return None if place is None else place.key


@torch.no_grad()
def _add_later(key: Tensor, grad_TO: Tensor, x_TI: Tensor) -> None:
    _sums[int(key)].add_product(grad_TO, x_TI)


# The sum is no argument: the first gradient of a step makes it. To compilers the operator changes
# the key, so that none leaves it out.
add_later = define(
    "add_product(Tensor(a!) key, Tensor grad_TO, Tensor x_TI) -> ()",
    _add_later,
    lambda key, grad_TO, x_TI: None,
)
"""Operator for compiled code: adds g^T x to the :class:`GradientSum` with a key."""


def table_gradient(grad_TH: Tensor, rows_T: Tensor, rows: int) -> Tensor:
    """Return the gradient [``rows``, H] of a table whose rows ``rows_T`` were used."""
    return torch.ops.aten.embedding_dense_backward(grad_TH, rows_T, rows, -1, False)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight, place):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(ids)
        ctx.place = place
        return nn.functional.embedding(ids, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (ids,) = ctx.saved_tensors
        return None, ctx.place.add_rows(grad.flatten(0, -2), ids.flatten()), None


def looked_up(ids: Tensor, weight_VH: Tensor) -> Tensor:
    """Return the rows of a table, [..., H], for ids [...]."""
    place = sum_of(weight_VH) if torch.is_grad_enabled() else None
    if place is None:
        return nn.functional.embedding(ids, weight_VH)
    return _Lookup.apply(ids, weight_VH, place)  # type: ignore[no-any-return]


@cache
def adds_products(device: torch.device, dtype: torch.dtype, into: torch.dtype) -> bool:
    """True if this torch adds a product of matrices of a dtype to a matrix in the dtype ``into``,
    as GPUs do: to one in float32 since torch 2.12 or so. On CPUs :data:`PRODUCTS_ON` has the reason
    for which it does not."""
    if device.type == "cpu":
        return False
    left, right = (torch.zeros(16, 16, dtype=dtype, device=device) for _ in range(2))
    try:
        add_product(torch.zeros(16, 16, dtype=into, device=device), left, right, 1)
    except (RuntimeError, TypeError):
        return False
    return True


def add_product(sum_OI: Tensor, grad_TO: Tensor, x_TI: Tensor, keep: int) -> None:
    """Adds g^T x to the sum if ``keep`` is 1, and replaces it, whatever was there, if it is 0."""
    if sum_OI.dtype == x_TI.dtype:
        torch.addmm(sum_OI, grad_TO.t(), x_TI, beta=keep, out=sum_OI)
        return
    torch.addmm(sum_OI, grad_TO.t(), x_TI, out_dtype=sum_OI.dtype, beta=keep, out=sum_OI)


def add_wider(total: Tensor, addend: Tensor) -> None:
    """Adds in place. On a CPU torch would first copy the whole addend into the dtype of the sum."""
    if total.dtype == addend.dtype or total.device.type != "cpu" or total.dim() < 2:
        total.add_(addend)
        return
    rows = rows_of_work(total[0].numel())
    for part, more in zip(total.split(rows), addend.split(rows), strict=True):
        part.add_(more)


def scaled(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient times a factor, rounded once; it may be overwritten."""
    if grad.dtype == dtype or grad.device.type == "cpu":
        return grad.mul_(factor).to(dtype)
    # One kernel of 6 bytes an element instead of two of 14; CPUs would copy it all the same.
    return torch.mul(grad, factor, out=torch.empty_like(grad, dtype=dtype))


def rows_of_work(columns: int) -> int:
    """Rows of float32 numbers that a CPU works on at a time."""
    return max(1, WORK_BYTES // (4 * columns))
