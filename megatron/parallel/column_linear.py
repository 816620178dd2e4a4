"""The product with which activations enter a tensor-parallel layers.

With sequence parallelism the input is gathered for the product and again in the backward pass, so
that only a rank's slice of it is kept in between (Korthikanti et al. 2022, arXiv:2205.05198,
section 4.2.2). Collectives of the backward pass run beside products that do not wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.parallel.collectives import (
    Finish,
    start_all_reduce,
    start_gather_sequence,
    start_scatter_sequence,
    start_sum_over_copies,
)
from megatron.parallel.float8 import Float8, check_tokens, linear, product_dtype
from megatron.parallel.mesh import Group


class LinearMap(NamedTuple):
    """One rank's share of y = x A^T + b.

    Attributes:
        weight: [OP, I].
        bias: [OP] or None.
        copies: how many neighbouring ranks hold this same share; its gradient is summed over them.
        float8: how it is multiplied in 8 bits; None for the number format of the input.
    """

    weight: Tensor
    bias: Tensor | None
    copies: int = 1
    float8: Float8 | None = None


def column_linear(
    x_BSI: Tensor, maps: Sequence[LinearMap], group: Group, sequence: bool
) -> tuple[Tensor, ...]:
    """Outputs of several maps of one input, each [B, S, OP].

    Args:
        x_BSI: [B, S, I], the same on every rank; with ``sequence`` this rank's [B, S/t, I].
        maps: this rank's shares.
        group: the tensor-parallel group.
        sequence: whether the input is split along the sequence.

    Raises:
        ValueError: 16 does not divide the tokens that weights are trained on in 8 bits.
    """
    weights, biases, copies, float8s = zip(*maps, strict=True)
    if group.size == 1:
        return tuple(map(linear, repeat(x_BSI), weights, biases, float8s))
    if any(float8s) and torch.is_grad_enabled():
        check_tokens(x_BSI.shape[:-1].numel() * (group.size if sequence else 1))
    return _ColumnLinear.apply(x_BSI, group, sequence, copies, float8s, *weights, *biases)


class _ColumnLinear(torch.autograd.Function):
    # Parameters are saved as they came, not cast and not as views: ZeRO 3 frees their values after
    # the forward pass and has them back before the backward pass.

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: Group,
        sequence: bool,
        copies: tuple[int, ...],
        float8s: tuple[Float8 | None, ...],
        *params: Any,
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.sequence, ctx.copies, ctx.input_dtype = group, sequence, copies, x.dtype
        ctx.float8s = float8s
        x = x.to(product_dtype(x))
        ctx.save_for_backward(x, *params)
        if sequence:
            x = start_gather_sequence(x, group)()
        weights, biases = params[: len(copies)], params[len(copies) :]
        return tuple(
            _output(x, weight, None if bias is None else bias.to(x.dtype), float8)
            for weight, bias, float8 in zip(weights, biases, float8s, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads_BSO: Tensor) -> tuple[Tensor | None, ...]:
        x, *params = ctx.saved_tensors
        count = len(ctx.copies)
        weights, biases = params[:count], params[count:]
        x_needs, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[5:]
        finish_x: Finish = lambda: x  # noqa: E731
        if ctx.sequence:
            finish_x = start_gather_sequence(x, ctx.group)
        finish_x_grad: Finish | None = None
        if x_needs:
            start = start_scatter_sequence if ctx.sequence else start_all_reduce
            finish_x_grad = start(_input_gradient(grads_BSO, weights, ctx.float8s), ctx.group)
        x_TI = finish_x().flatten(0, 1)
        pending = []
        for place, (grad_BSO, copies) in enumerate(zip(grads_BSO, ctx.copies, strict=True)):
            grad_TO = grad_BSO.flatten(0, 1)
            weight_grad = bias_grad = None
            if needs[place]:
                weight_grad = _weight_gradient(grad_TO, x_TI, ctx.float8s[place])
                weight_grad = weight_grad.to(weights[place].dtype)
            if needs[count + place]:
                bias_grad = grad_TO.sum(0).to(biases[place].dtype)
            pending.append(_start_sums((weight_grad, bias_grad), copies, ctx.group))
        weight_grads, bias_grads = zip(*(finish() for finish in pending), strict=True)
        x_grad = None if finish_x_grad is None else finish_x_grad().to(ctx.input_dtype)
        return x_grad, None, None, None, None, *weight_grads, *bias_grads


def _output(x_BSI: Tensor, weight: Tensor, bias: Tensor | None, float8: Float8 | None) -> Tensor:
    if float8 is None:
        # F.linear, not a plain product: DeepSpeed's profiler counts it.
        return F.linear(x_BSI, weight.to(x_BSI.dtype), bias)
    y_BSO = float8.output(x_BSI.flatten(0, 1), weight).unflatten(0, x_BSI.shape[:2])
    return y_BSO if bias is None else y_BSO + bias


def _input_gradient(
    grads_BSO: Sequence[Tensor], weights: Sequence[Tensor], float8s: Sequence[Float8 | None]
) -> Tensor:
    """This rank's addend of the gradient of the whole input [B, S, I]."""
    first, *rest = (
        grad_BSO @ weight.to(grad_BSO.dtype)
        if float8 is None
        else float8.input_gradient(grad_BSO.flatten(0, 1), weight).unflatten(0, grad_BSO.shape[:2])
        for grad_BSO, weight, float8 in zip(grads_BSO, weights, float8s, strict=True)
    )
    for addend in rest:
        first += addend
    return first


def _weight_gradient(grad_TO: Tensor, x_TI: Tensor, float8: Float8 | None) -> Tensor:
    return grad_TO.t() @ x_TI if float8 is None else float8.weight_gradient(grad_TO, x_TI)


def _start_sums(
    grads: tuple[Tensor | None, Tensor | None], copies: int, group: Group
) -> Callable[[], tuple[Tensor | None, Tensor | None]]:
    """Sums the gradients of a map over the ranks that hold the same share, in one collective."""
    found = [grad for grad in grads if grad is not None]
    if copies == 1 or not found:
        return lambda: grads
    flat = torch.cat([grad.flatten() for grad in found])
    finish_flat = start_sum_over_copies(flat, copies, group)

    def finish() -> tuple[Tensor | None, Tensor | None]:
        totals = finish_flat().split([grad.numel() for grad in found])
        for grad, total in zip(found, totals, strict=True):
            grad.copy_(total.view_as(grad))
        return grads

    return finish
