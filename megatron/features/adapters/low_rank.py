"""Linear maps with LoRA adapters: y = x W^T + b + s (x A^T) B^T with a frozen W (Hu et al. 2021,
arXiv:2106.09685, equation 3), and their gradients.

The adapters cost only their own GEMMs. All A of a layer are one GEMM with the input. The products
with each B are added in place to the outputs, and those with A to the gradient of the input.
Nothing is saved for the gradient of W, and x is saved only for the gradients of A.

Shapes: B batch, S sequence, T tokens (B x S), I input, O output, R total rank of all adapters, r
rank of one. A suffix P marks one tensor-parallel rank's shard of a dimension.
"""

from __future__ import annotations

from collections.abc import Callable
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
from megatron.parallel.mesh import SINGLE, Group
from megatron.parallel.tensor_parallel import autocast_dtype


class UpPlace(NamedTuple):
    """Location of one B matrix. It adds to the outputs [start, start + width) of the linear map
    with index ``map``, and reads the columns [first, first + r) of x A^T. Its gradient is summed
    over ``copies`` neighbouring ranks."""

    map: int
    start: int
    width: int
    first: int
    copies: int = 1


class LowRank(NamedTuple):
    """Constants of a layer's adapters.

    Attributes:
        maps: number of linear maps of the input, each with a weight and an optional bias.
        downs: number of A matrices.
        pieces: locations of the B matrices.
        scale: the factor s.
        group: tensor-parallel group of the layer.
        enters: True for a column-parallel layer, whose input is the same on every rank. False for a
            row-parallel layer: each rank has a shard of the input features, and the outputs are
            partial sums.
        sequence: whether the input of a column-parallel layer is a slice of the sequence.
    """

    maps: int
    downs: int
    pieces: tuple[UpPlace, ...]
    scale: float
    group: Group = SINGLE
    enters: bool = True
    sequence: bool = False


def low_rank_linear(
    x_BSI: Tensor, dropped_BSI: Tensor | None, form: LowRank, *tensors: Any
) -> tuple[Tensor, ...]:
    """Return the outputs [B, S, OP] of each map. ``tensors`` are the weights [OP, I], the biases
    [OP] or None, the A matrices [r, I], and the B matrices [OP, r]. ``dropped_BSI`` is the input of
    A after dropout, or None if A reads x itself. A weight may be a :class:`QuantisedWeight`."""
    return _LowRankLinear.apply(x_BSI, dropped_BSI, form, *tensors)


class _LowRankLinear(torch.autograd.Function):
    # Parameters are saved without a cast; see _ColumnLinear in layers.py.

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dropped: Tensor | None, form: LowRank, *tensors: Any
    ) -> tuple[Tensor, ...]:
        weights, biases, downs, ups = _parts(form, tensors)
        ctx.form, ctx.input_dtype, ctx.drops = form, x.dtype, dropped is not None
        mine = x = x.to(autocast_dtype(x))
        if form.sequence:
            x = start_gather_sequence(x, form.group)()
        of_downs = x
        if dropped is not None:
            mine = of_downs = dropped.to(x.dtype)
            if form.sequence:
                of_downs = start_gather_sequence(of_downs, form.group)()
        z_TR = of_downs.flatten(0, 1) @ _joined(downs, x).t()
        outputs = []
        for weight, bias in zip(weights, biases, strict=True):
            # F.linear rather than a plain GEMM, because DeepSpeed's profiler counts it.
            outputs.append(F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x)))
        for piece, up in zip(form.pieces, ups, strict=True):
            part_TO = outputs[piece.map].flatten(0, 1).narrow(1, piece.start, piece.width)
            z_Tr = z_TR.narrow(1, piece.first, up.shape[1])
            part_TO.addmm_(z_Tr, up.to(x.dtype).t(), alpha=form.scale)
        down_needs, up_needs = _needs(form, ctx.needs_input_grad)
        kept = mine if any(down_needs) else None, z_TR if any(up_needs) else None
        # Biases are not needed in the backward pass. Autograd cannot save 4-bit weights.
        ctx.weights = tuple(None if isinstance(weight, Tensor) else weight for weight in weights)
        saved = (weight if isinstance(weight, Tensor) else None for weight in weights)
        ctx.save_for_backward(*kept, *saved, *downs, *ups)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads_BSO: Tensor) -> tuple[Any, ...]:
        form: LowRank = ctx.form
        mine, z_TR, *tensors = ctx.saved_tensors
        weights, downs, ups = (
            [
                own if own is not None else saved
                for own, saved in zip(ctx.weights, tensors[: form.maps], strict=True)
            ],
            tensors[form.maps : form.maps + form.downs],
            tensors[form.maps + form.downs :],
        )
        x_needs, dropped_needs = ctx.needs_input_grad[:2]
        down_needs, up_needs = _needs(form, ctx.needs_input_grad)
        finish_x: Finish = lambda: mine  # noqa: E731
        if form.sequence and any(down_needs):
            finish_x = start_gather_sequence(mine, form.group)
        grads = [grad.flatten(0, 1) for grad in grads_BSO]
        total = sum(down.shape[0] for down in downs)
        # An adapter may have several B matrices, each of which adds its contribution.
        dz_TR = grads[0].new_zeros(grads[0].shape[0], total)
        for piece, up in zip(form.pieces, ups, strict=True):
            part_TO = grads[piece.map].narrow(1, piece.start, piece.width)
            dz_Tr = dz_TR.narrow(1, piece.first, up.shape[1])
            dz_Tr.addmm_(part_TO, up.to(part_TO.dtype), alpha=form.scale)
        x_grad: Callable[[], Tensor | None] = _no_gradient
        dropped_grad = x_grad
        if x_needs:
            x_TI = _input_gradient(grads, weights)
            if not ctx.drops:
                x_TI.addmm_(dz_TR, _joined(downs, x_TI))
            x_grad = _start_leaving(x_TI.unflatten(0, grads_BSO[0].shape[:2]), form)
        if dropped_needs:
            x_TI = dz_TR @ _joined(downs, dz_TR)
            dropped_grad = _start_leaving(x_TI.unflatten(0, grads_BSO[0].shape[:2]), form)
        summed = []
        for piece, up, needed in zip(form.pieces, ups, up_needs, strict=True):
            up_grad = None
            if needed:
                part_TO = grads[piece.map].narrow(1, piece.start, piece.width)
                up_grad = part_TO.t() @ z_TR.narrow(1, piece.first, up.shape[1])
                up_grad = up_grad.mul_(form.scale).to(up.dtype)
            summed.append((up_grad, piece.copies))
        down_grads: list[Tensor | None] = [None] * form.downs
        if any(down_needs):
            joined_RI = dz_TR.t() @ finish_x().flatten(0, 1)
            parts = joined_RI.split([down.shape[0] for down in downs])
            down_grads = [p.to(d.dtype) for p, d in zip(parts, downs, strict=True)]
        copies = form.group.size if form.enters else 1
        summed = [*((grad, copies) for grad in down_grads), *summed]
        found_grads = _sums(summed, form.group)
        inputs = x_grad(), dropped_grad()
        return (
            *(None if grad is None else grad.to(ctx.input_dtype) for grad in inputs),
            None,
            *[None] * (2 * form.maps),
            *found_grads,
        )


def _no_gradient() -> None:
    return None


def _start_leaving(addend_BSI: Tensor, form: LowRank) -> Callable[[], Tensor | None]:
    """Sum the gradient of the input over ranks if the input is the same on every rank. Return a
    function that waits for the result."""
    if form.group.size == 1 or not form.enters:
        return lambda: addend_BSI
    start = start_scatter_sequence if form.sequence else start_all_reduce
    return start(addend_BSI, form.group)


def _parts(form: LowRank, tensors: Any) -> tuple[Any, Any, Any, Any]:
    n, m = form.maps, form.downs
    return tensors[:n], tensors[n : 2 * n], tensors[2 * n : 2 * n + m], tensors[2 * n + m :]


def _needs(form: LowRank, needs: tuple[bool, ...]) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Return two tuples: whether each A matrix and each B matrix needs a gradient."""
    first = 3 + 2 * form.maps
    return needs[first : first + form.downs], needs[first + form.downs :]


def _joined(downs: Any, like_TI: Tensor) -> Tensor:
    """Concatenate all A matrices of a layer into one matrix [R, I], in the dtype of ``like_TI``."""
    if not downs:
        return like_TI.new_empty(0, like_TI.shape[-1])
    dtype = like_TI.dtype
    return downs[0].to(dtype) if len(downs) == 1 else torch.cat([d.to(dtype) for d in downs])


def _input_gradient(grads: list[Tensor], weights: list[Any]) -> Tensor:
    """Return the gradient of the input through the weights, [T, I]."""
    (first, *rest) = zip(grads, weights, strict=True)
    x_grad = first[0] @ first[1].to(first[0].dtype)
    for grad, weight in rest:
        x_grad.addmm_(grad, weight.to(grad.dtype))
    return x_grad


def _sums(grads: list[tuple[Tensor | None, int]], group: Group) -> list[Tensor | None]:
    """Sum each gradient over its number of neighbouring ranks. Gradients with the same number share
    a collective."""
    flat: dict[int, Tensor] = {}
    for copies in sorted({copies for grad, copies in grads if grad is not None and copies > 1}):
        flat[copies] = torch.cat([g.flatten() for g, c in grads if c == copies and g is not None])
    pending = {
        copies: start_all_reduce(values, group)
        if copies == group.size
        else start_sum_over_copies(values, copies, group)
        for copies, values in flat.items()
    }
    totals = {copies: finish() for copies, finish in pending.items()}
    places = dict.fromkeys(totals, 0)
    sums: list[Tensor | None] = []
    for grad, copies in grads:
        if grad is None or copies not in totals:
            sums.append(grad)
            continue
        start = places[copies]
        places[copies] = start + grad.numel()
        sums.append(totals[copies][start : start + grad.numel()].view_as(grad))
    return sums
