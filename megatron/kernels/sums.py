"""Weight gradients that are added to their sum over micro batches by the kernels that compute them.

By default, autograd writes a micro batch's gradient to memory, reads it again, and adds it to the
sum. In 16 bits it rounds both times. Here, a GEMM adds its product to the sum with a single
rounding, and an embedding is updated only in the rows that a micro batch used. A sum starts as the
first gradient, without being filled with zeros.

Shapes: T tokens, I input, O output, V rows of an embedding, H their width.
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
"""Device types on which GEMMs add to sums. On a CPU, this takes as long as a GEMM and an addition,
with the same rounding as autograd's."""

WORK_BYTES = 2 * 2**20
"""Size in bytes of the float32 workspace on CPUs, which fits into a core's caches."""

_numbers = count()
_sums: WeakValueDictionary[int, GradientSum] = WeakValueDictionary()


class GradientSum:
    """Sum of a weight's gradients in a step. By default it is the weight's ``grad``, to which
    autograd may add too, unless ``total`` returns another tensor after the first gradient. The
    weight's hooks receive each pass's gradient as with autograd, and None from autograd itself.

    Attributes:
        key: number of this object, for :func:`add_later`. It is a tensor, so that one compiled
          graph serves all blocks of the same shape.
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
        """Sum so far. None before the first gradient of a step."""
        return self.weight.grad if self._total is None else self._total()

    @property
    def hooked(self) -> bool:
        """True if the weight has a hook, which expects the gradient of a whole backward pass."""
        return bool(self.weight._backward_hooks)

    def start(self, grad: Tensor) -> None:
        """Use a step's first gradient, in the weight's dtype, as the sum."""
        self.weight.grad = grad

    def add(self, grad: Tensor) -> None:
        """Run the weight's hooks on a gradient and add it. A step's first one becomes the sum."""
        for hook in list((self.weight._backward_hooks or {}).values()):
            changed = hook(grad)
            grad = grad if changed is None else changed
        total = self.total
        if total is None:
            self.start(grad.to(self.weight.dtype))
        else:
            add_wider(total, grad)

    def add_scaled(self, grad: Tensor, factor: Tensor) -> Tensor | None:
        """Add a backward pass's gradient times a one-element factor, with a single rounding, and
        return None. If autograd must call a hook afterwards, return the gradient for autograd
        instead. The argument may be overwritten."""
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
        """Add a gradient at the end of the backward pass, summed over the pass as in autograd."""
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
        """Add the matrix product g^T x, [O, I]."""
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
        """Add gradients to the embedding rows that were used, and return None. If no sum exists
        yet, or most rows are used, return the whole gradient [V, H] for autograd instead."""
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
        # First sum the gradients of equal row indices, in their order.
        sorted_T, order_T = rows_T.sort(stable=True)
        place_T = torch.zeros_like(sorted_T)
        torch.cumsum(sorted_T[1:] != sorted_T[:-1], 0, out=place_T[1:])
        places_T = torch.empty_like(order_T).scatter_(0, order_T, place_T)
        # Unused places add zeros to distinct rows, so that atomic additions do not compete.
        into_T = torch.arange(len(rows_T), device=rows_T.device).scatter_(0, place_T, sorted_T)
        addend_TH = table_gradient(grad_TH, places_T, len(rows_T))
        sum_VH.index_add_(0, into_T, addend_TH.to(sum_VH.dtype))
        return None


def sum_of(weight: Tensor) -> GradientSum | None:
    """Return the sum to which a weight's gradients are added, or None if autograd adds them."""
    return getattr(weight, "gradient_sum", None) if SWITCHES["sums"] else None


def key_of(weight: Tensor) -> Tensor | None:
    """Return the key of the sum to which GEMMs add a weight's gradients, or None if not used."""
    place = sum_of(weight) if weight.device.type in PRODUCTS_ON else None
    return None if place is None else place.key


@torch.no_grad()
def _add_later(key: Tensor, grad_TO: Tensor, x_TI: Tensor) -> None:
    _sums[int(key)].add_product(grad_TO, x_TI)


# The sum is not an argument, because it does not exist before the first gradient of a step. The
# operator is declared to mutate the key, so that compilers do not eliminate the call.
add_later = define(
    "add_product(Tensor(a!) key, Tensor grad_TO, Tensor x_TI) -> ()",
    _add_later,
    lambda key, grad_TO, x_TI: None,
)
"""Operator for compiled code that adds g^T x to the :class:`GradientSum` with this key."""


def table_gradient(grad_TH: Tensor, rows_T: Tensor, rows: int) -> Tensor:
    """Return the gradient [``rows``, H] of an embedding from which ``rows_T`` were looked up."""
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
    """Look up ids [...] in an embedding, [..., H]. Its gradients go to its sum if it has one."""
    place = sum_of(weight_VH) if torch.is_grad_enabled() else None
    if place is None:
        return nn.functional.embedding(ids, weight_VH)
    return _Lookup.apply(ids, weight_VH, place)  # type: ignore[no-any-return]


@cache
def adds_products(device: torch.device, dtype: torch.dtype, into: torch.dtype) -> bool:
    """Return whether this version of torch can add a GEMM of dtype ``dtype`` to a matrix of dtype
    ``into`` in one kernel. GPUs can, but adding to float32 needs about torch 2.12. CPUs are
    excluded for the reason given at :data:`PRODUCTS_ON`."""
    if device.type == "cpu":
        return False
    left, right = (torch.zeros(16, 16, dtype=dtype, device=device) for _ in range(2))
    try:
        add_product(torch.zeros(16, 16, dtype=into, device=device), left, right, 1)
    except (RuntimeError, TypeError):
        return False
    return True


def add_product(sum_OI: Tensor, grad_TO: Tensor, x_TI: Tensor, keep: int) -> None:
    """Add g^T x to ``sum_OI`` if ``keep`` is 1, or overwrite it if ``keep`` is 0."""
    if sum_OI.dtype == x_TI.dtype:
        torch.addmm(sum_OI, grad_TO.t(), x_TI, beta=keep, out=sum_OI)
        return
    torch.addmm(sum_OI, grad_TO.t(), x_TI, out_dtype=sum_OI.dtype, beta=keep, out=sum_OI)


def add_wider(total: Tensor, addend: Tensor) -> None:
    """Add in place. On a CPU, torch would first convert the whole addend to the dtype of the sum.
    This function converts a few rows at a time."""
    if total.dtype == addend.dtype or total.device.type != "cpu" or total.dim() < 2:
        total.add_(addend)
        return
    rows = rows_of_work(total[0].numel())
    for part, more in zip(total.split(rows), addend.split(rows), strict=True):
        part.add_(more)


def scaled(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a gradient, which may be overwritten, times a factor, rounded once to ``dtype``."""
    if grad.dtype == dtype or grad.device.type == "cpu":
        return grad.mul_(factor).to(dtype)
    # One kernel moves 6 bytes per element, two would move 14. CPUs copy the gradient anyway.
    return torch.mul(grad, factor, out=torch.empty_like(grad, dtype=dtype))


def rows_of_work(columns: int) -> int:
    """Return how many rows of float32 numbers to process at a time on a CPU."""
    return max(1, WORK_BYTES // (4 * columns))
