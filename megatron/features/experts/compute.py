"""Sorting of tokens by expert, and the MLPs of experts. A token has one row for each expert that it
chose. Rows are sorted once. Outputs and gradients are gathered back by the position of each choice,
so that the summation order is deterministic.

Shapes: T tokens, E experts (in weights the experts of this rank), K choices of a token, R rows, H
hidden size, F inner width, G outputs of the first matrix (F, or 2 F with a gate), X any width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.features.experts.linear import (
    ExpertLinear,
    Sizes,
    bias_gradient,
    expert_of_row,
    expert_outputs,
    input_gradient,
    weight_gradient,
)
from megatron.parallel.later_products import Gradients, GradientsOf, now_or_later
from megatron.parallel.tensor_parallel import autocast_dtype

Activation = Callable[[Tensor], Tensor]

_CHUNK = 2**18, 2**26
"""Number of elements per chunk when dot products of rows are computed, on a CPU and on a GPU."""


class RowOrder(NamedTuple):
    """Order of the rows: by expert, and within an expert by token.

    Attributes:
        rows_R: index of each row's token. On a GPU dropped choices have rows too, which come last
            and are not computed.
        place_TK: row of each choice; R if the choice is dropped.
        counts_E: number of rows of each expert, int64.
        sizes: ``counts_E`` as a list; None on a GPU, where copying it would synchronize.
    """

    rows_R: Tensor
    place_TK: Tensor
    counts_E: Tensor
    sizes: list[int] | None


def order(experts_TK: Tensor, experts: int) -> RowOrder:
    """Sort the choices into rows. A choice is an expert's index, or ``experts`` if it is
    dropped."""
    choices = experts_TK.shape[-1]
    sorted_R, choice_R = torch.sort(experts_TK.flatten(), stable=True)
    edges = torch.arange(experts + 1, device=experts_TK.device)
    counts_E = torch.searchsorted(sorted_R, edges).diff()
    sizes = counts_E.tolist() if experts_TK.device.type == "cpu" else None
    if sizes is not None:
        choice_R = choice_R[: sum(sizes)]
    rows = len(choice_R)
    place_TK = torch.full_like(experts_TK, rows)
    place_TK.view(-1)[choice_R] = torch.arange(rows, device=experts_TK.device)
    if sizes is None:
        place_TK.masked_fill_(experts_TK == experts, rows)
    return RowOrder(choice_R // choices, place_TK, counts_E, sizes)


def dispatch(x_TX: Tensor, rows: RowOrder) -> Tensor:
    """Return the rows [R, X]: copies of the tokens, sorted by expert."""
    return _Dispatch.apply(x_TX, rows)


def combine(y_RX: Tensor, weights_TK: Tensor, rows: RowOrder) -> Tensor:
    """Return the sum of weight x row over each token's choices, [T, X]. It is computed in float32
    or wider, and returned in the dtype of the rows. The trailing rows of dropped choices may be
    omitted from ``y_RX``."""
    return _Combine.apply(y_RX, weights_TK, rows)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TX: Tensor, rows: RowOrder) -> Tensor:
        ctx.save_for_backward(rows.place_TK)
        return x_TX.index_select(0, rows.rows_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RX: Tensor) -> tuple[Tensor, None]:
        (place_TK,) = ctx.saved_tensors
        return _sum_of_rows(grad_RX, place_TK), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RX: Tensor, weights_TK: Tensor, rows: RowOrder) -> Tensor:
        ctx.save_for_backward(y_RX, weights_TK, rows.rows_R, rows.place_TK)
        return _sum_of_rows(y_RX, rows.place_TK, weights_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TX: Tensor) -> tuple[Tensor, Tensor, None]:
        y_RX, weights_TK, rows_R, place_TK = ctx.saved_tensors
        grad_RX = grad_TX.index_select(0, rows_R[: len(y_RX)])
        weights_grad = _by_choice(_dots(grad_RX, y_RX), place_TK).to(weights_TK.dtype)
        grad_RX *= _by_row(weights_TK, place_TK, len(y_RX))[:, None]
        return grad_RX, weights_grad, None


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _dots(a_RX: Tensor, b_RX: Tensor) -> Tensor:
    """Return the dot product of each pair of rows, [R], in float32 or wider."""
    kind = _exact(a_RX.dtype)
    rows = max(1, _CHUNK[a_RX.is_cuda] // a_RX.shape[1])
    pairs = zip(a_RX.split(rows), b_RX.split(rows), strict=True)
    return torch.cat([torch.linalg.vecdot(a.to(kind), b.to(kind)) for a, b in pairs])


def _by_row(values_TK: Tensor, place_TK: Tensor, rows: int) -> Tensor:
    """Reorder values of choices into rows, [R]. Rows without a choice are zero."""
    values_R = values_TK.new_zeros(rows + 1)  # the extra last element receives dropped choices
    place = place_TK.clamp(max=rows).flatten()
    return values_R.scatter_(0, place, values_TK.flatten())[:rows]


def _by_choice(values_R: Tensor, place_TK: Tensor) -> Tensor:
    """Reorder values of rows into choices, [T, K]. Dropped choices are zero."""
    return F.pad(values_R, (0, 1)).take(place_TK.clamp(max=len(values_R)))


def _sum_of_rows(y_RX: Tensor, place_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    """Return the weighted sum of each token's rows, [T, X], added up choice by choice. Dropped
    choices are ignored whatever their weight."""
    rows, kind = len(y_RX), _exact(y_RX.dtype)
    there_TK = place_TK < rows
    if y_RX.device.type == "cpu":
        counts_T = there_TK.sum(1)
        return F.embedding_bag(
            place_TK[there_TK],
            y_RX.to(kind),
            counts_T.cumsum(0) - counts_T,
            mode="sum",
            per_sample_weights=None if weights_TK is None else weights_TK[there_TK].to(kind),
        ).to(y_RX.dtype)
    sum_TX = y_RX.new_zeros(len(place_TK), y_RX.shape[1], dtype=kind)
    for choice, (place_T, there_T) in enumerate(zip(place_TK.T, there_TK.T, strict=True)):
        # Rows that are not computed may contain NaN.
        row_TX = y_RX.index_select(0, place_T.clamp(max=rows - 1))
        row_TX = row_TX.masked_fill_(~there_T[:, None], 0)
        sum_TX += row_TX if weights_TK is None else row_TX * weights_TK[:, choice, None].to(kind)
    return sum_TX.to(y_RX.dtype)


def expert_mlp(
    x_TH: Tensor,
    weights_TK: Tensor,
    rows: RowOrder,
    up: ExpertLinear,
    down: ExpertLinear,
    activation: Activation,
) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts, [T, H], on a rank that has
    all experts. It fuses :func:`dispatch`, ``up``, ``activation``, ``down`` and :func:`combine`
    into one autograd function, which saves only the activation's input for the backward pass."""
    sizes = rows.counts_E if rows.sizes is None else rows.sizes
    if not torch.is_grad_enabled() or up.alone or down.alone:
        h_RG = up(dispatch(x_TH, rows), sizes)
        return combine(down(activation(h_RG), sizes), weights_TK, rows)

    def with_up(x_TH: Tensor, *of_up: Tensor | None) -> Tensor:
        def with_down(x_TH: Tensor, *of_down: Tensor | None) -> Tensor:
            gradients, params = now_or_later(*of_up, *of_down)
            how = rows, gradients, sizes, activation, down.adds_bias
            return _ExpertMLP.apply(x_TH, weights_TK, *params, how)

        return down(x_TH, sizes, with_down)

    return up(x_TH, sizes, with_up)


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        weights_TK: Tensor,
        up_EGH: Tensor,
        up_bias_EG: Tensor | None,
        down_EHF: Tensor,
        down_bias_EH: Tensor | None,
        how: tuple[RowOrder, GradientsOf, Sizes, Activation, bool],
    ) -> Tensor:
        rows, ctx.gradients, *ctx.how = how
        sizes, activation, adds_bias = ctx.how
        ctx.input_dtype = x_TH.dtype
        x_TH = x_TH.to(autocast_dtype(x_TH))
        h_RG = expert_outputs(x_TH.index_select(0, rows.rows_R), up_EGH, up_bias_EG, sizes)
        added = down_bias_EH if adds_bias else None
        y_RH = expert_outputs(activation(h_RG), down_EHF, added, sizes)
        params = up_EGH, up_bias_EG, down_EHF, down_bias_EH
        ctx.save_for_backward(x_TH, weights_TK, rows.rows_R, rows.place_TK, h_RG, *params)
        return _sum_of_rows(y_RH, rows.place_TK, weights_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, weights_TK, rows_R, place_TK, h_RG, *params = ctx.saved_tensors
        up_EGH, up_bias_EG, down_EHF, down_bias_EH = params
        sizes, activation, adds_bias = ctx.how
        x_needs, weights_need, *needs = ctx.needs_input_grad[:6]
        x_grad = weights_grad = None
        weights_R1 = _by_row(weights_TK, place_TK, len(rows_R))[:, None]
        grad_RH = grad_TH.index_select(0, rows_R)
        h_RG = h_RG.detach().requires_grad_()
        with torch.enable_grad():
            a_RF = activation(h_RG)
        # Do not apply the routing weight yet: the dot product of this gradient with the activation
        # is the gradient of the routing weight, because g . (D a) = (D^T g) . a.
        a_grad_RF = input_gradient(grad_RH, down_EHF, sizes)
        if weights_need:
            dots_R = _dots(a_grad_RF, a_RF.detach())
            if down_bias_EH is not None and adds_bias:
                dots_TE = grad_TH @ down_bias_EH.to(grad_TH.dtype).T
                dots_R += dots_TE[rows_R, expert_of_row(sizes, rows_R)]
            weights_grad = _by_choice(dots_R, place_TK).to(weights_TK.dtype)
        (h_grad_RG,) = torch.autograd.grad(a_RF, h_RG, a_grad_RF.mul_(weights_R1))
        a_RF = a_RF.detach()

        def products() -> Gradients:
            down_grad = down_bias_grad = up_grad = up_bias_grad = None
            if needs[2]:
                weighted_RF = (a_RF * weights_R1).to(a_RF.dtype)
                down_grad = weight_gradient(grad_RH, weighted_RF, down_EHF, sizes)
            if needs[3]:
                down_bias_grad = bias_gradient(grad_RH.mul_(weights_R1), down_bias_EH, sizes)
            if needs[0]:
                up_grad = weight_gradient(h_grad_RG, x_TH.index_select(0, rows_R), up_EGH, sizes)
            if needs[1]:
                up_bias_grad = bias_gradient(h_grad_RG, up_bias_EG, sizes)
            return up_grad, up_bias_grad, down_grad, down_bias_grad

        of_params = ctx.gradients(products)
        if x_needs:
            x_grad_RH = input_gradient(h_grad_RG, up_EGH, sizes)
            x_grad = _sum_of_rows(x_grad_RH, place_TK).to(ctx.input_dtype)
        return x_grad, weights_grad, *of_params, None


def padded_places(sizes: Sequence[int], padded: Callable[[int], int]) -> tuple[Tensor, list[int]]:
    """Return the positions of the rows, int64 [R] on the CPU, after each expert's n rows are padded
    to ``padded(n)``, and the padded row counts. Experts without rows are not padded."""
    larger = [padded(size) if size else 0 for size in sizes]
    begins = [end - size for size, end in zip(larger, accumulate(larger), strict=True)]
    ranges = [torch.arange(b, b + size) for b, size in zip(begins, sizes, strict=True)]
    return torch.cat(ranges), larger
