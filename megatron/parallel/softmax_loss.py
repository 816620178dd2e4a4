"""Cross entropy of a chunk of logits, and its gradient instead of them.

There are two ways. On CPUs torch's own functions go over a few rows at a time, in float32 memory
that fits into a core's caches. On GPUs with a compiler the whole chunk is compiled into kernels
that hold nothing but 16-bit logits in memory: they are read twice and written once. Between the two
reads tensor-parallel ranks exchange what each knows of the softmax.

Shapes: C tokens of the chunk, R rows of them, P columns of logits on this rank, V those of P that
are tokens and no padding, N blocks of columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.compiler import allow_graphs, missing_compiler
from megatron.parallel.mesh import Group
from megatron.util.processes import is_main_process

WORK_BYTES = 2 * 2**20
"""Size of the float32 work space on CPUs, which fits into a core's caches."""

BLOCK = 1024
"""Columns that one group of GPU threads reduces while it holds them in registers, so that their
maximum and their sum of exponentials take one read."""


GRAPHS = 64
"""Number of versions of a function that are compiled. Over torch's default, 8, a run whose numbers
of tokens vary, as with a curriculum, would end with an error."""


class Columns(NamedTuple):
    """Columns of the logits.

    Attributes:
        used: columns that are tokens (V); the rest is padding.
        softcap: that of :func:`capped`.
        z_coeff: factor of the squared logarithm of the softmax's denominator, whose gradient is
            added to that of the loss (Chowdhery et al. 2022, arXiv:2204.02311, section 5).
    """

    used: int
    softcap: float | None
    z_coeff: float = 0.0


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """softcap x tanh(logit / softcap); None leaves them alone."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _slope(capped_logits: Tensor, softcap: float | None) -> Tensor | None:
    """Derivative of the softcap, from what it returned."""
    return None if softcap is None else 1.0 - (capped_logits / softcap).square_()


class Softmax(NamedTuple):
    """Partial softmax of each token: the largest logit, the sum of exp(logit - largest), and the
    label's logit (zero where another rank has it), each [C] in the dtype of the work."""

    largest_C: Tensor
    total_C: Tensor
    target_C: Tensor

    def loss(self) -> Tensor:
        """-log softmax at the label: [C]."""
        return (self.largest_C - self.target_C) + self.total_C.log()

    def log_denominator(self) -> Tensor:
        """Logarithm of the sum of exponentials: [C]."""
        return self.largest_C + self.total_C.log()

    def joined(self, other: Softmax) -> Softmax:
        """Return the softmax of the columns of both."""
        largest_C = torch.maximum(self.largest_C, other.largest_C)
        total_C, more_C = (
            part.total_C * (part.largest_C - largest_C).exp() for part in (self, other)
        )
        return Softmax(largest_C, total_C + more_C, self.target_C + other.target_C)

    def over_ranks(self, group: Group) -> Softmax:
        """Return the softmax of all ranks' columns, where this is of one rank's."""
        largest_C = self.largest_C.clone()
        dist.all_reduce(largest_C, op=dist.ReduceOp.MAX, group=group.handle)
        sums_2C = torch.stack([self.total_C * (self.largest_C - largest_C).exp(), self.target_C])
        dist.all_reduce(sums_2C, group=group.handle)
        return Softmax(largest_C, sums_2C[0], sums_2C[1])


@cache
def compiles_for(device_type: str) -> bool:
    """True if the loss is compiled on this kind of device; a line says so if a GPU lacks what it
    takes. CPUs never ask, since that would import torch's compiler."""
    if device_type != "cuda":
        return False
    missing = missing_compiler(device_type)
    if missing is not None and is_main_process():
        print(f"loss: {missing}; it is computed eagerly, with more memory and traffic", flush=True)
    return missing is None


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """One of the functions below, compiled for one number of tokens, and at the second number that
    comes for all others."""
    allow_graphs(GRAPHS)
    return torch.compile(function, fullgraph=True)


def softmax_of(logits_CP: Tensor, labels_C: Tensor, columns: Columns) -> Softmax:
    """One read of the logits. A label that is no column of this rank must be negative."""
    width = logits_CP.shape[1]
    # The rest is a block of its own: torch's compiler for GPUs copies what is padded, in float32.
    whole = width - width % BLOCK
    places = [slice(start, stop) for start, stop in ((0, whole), (whole, width)) if start < stop]
    return functools.reduce(
        Softmax.joined, (_of_blocks(logits_CP, at, labels_C, columns) for at in places)
    )


def _of_blocks(logits_CP: Tensor, at: slice, labels_C: Tensor, columns: Columns) -> Softmax:
    """Return the softmax of some columns, block by block."""
    work = torch.promote_types(logits_CP.dtype, torch.float32)
    low = torch.finfo(work).min
    number_K = torch.arange(at.start, at.stop, device=logits_CP.device)
    # No -inf, whose difference from itself is not a number.
    capped_CK = capped(logits_CP[:, at].to(work), columns.softcap).clamp(min=low)
    capped_CK = torch.where(number_K < columns.used, capped_CK, low)
    target_CK = torch.where(number_K == labels_C[:, None], capped_CK, 0.0)
    block = min(BLOCK, at.stop - at.start)
    capped_CNB, target_CNB = (each.unflatten(1, (-1, block)) for each in (capped_CK, target_CK))
    largest_CN = capped_CNB.amax(-1)
    total_CN = (capped_CNB - largest_CN[..., None]).exp().sum(-1)
    largest_C = largest_CN.amax(-1)
    total_C = (total_CN * (largest_CN - largest_C[:, None]).exp()).sum(-1)
    return Softmax(largest_C, total_C, target_CNB.sum(-1).sum(-1))


def write_gradient(
    logits_CP: Tensor, labels_C: Tensor, weight_C: Tensor, softmax: Softmax, columns: Columns
) -> None:
    """Replaces the logits by the gradient of each token's loss times its weight, and padding by
    zeros: one read and one write."""
    number_P = torch.arange(logits_CP.shape[1], device=logits_CP.device)
    capped_CP = capped(logits_CP.to(softmax.total_C.dtype), columns.softcap)
    slope_CP = _slope(capped_CP, columns.softcap)
    # From the largest logit and not from the logarithm of the sum, which rounds more.
    share_C = softmax.total_C.reciprocal()
    if columns.z_coeff:
        share_C = share_C * (1.0 + 2.0 * columns.z_coeff * softmax.log_denominator())
    grad_CP = (capped_CP - softmax.largest_C[:, None]).exp() * share_C[:, None]
    grad_CP = grad_CP - (number_P == labels_C[:, None]).to(grad_CP.dtype)
    if slope_CP is not None:
        grad_CP = grad_CP * slope_CP
    grad_CP = torch.where(number_P < columns.used, grad_CP * weight_C[:, None], 0.0)
    logits_CP.copy_(grad_CP)


def loss_and_gradient(
    logits_CP: Tensor, labels_C: Tensor, weight_C: Tensor, columns: Columns
) -> Tensor:
    """Loss of each token, whose logits become the gradient of its weighted loss."""
    softmax = softmax_of(logits_CP, labels_C, columns)
    write_gradient(logits_CP, labels_C, weight_C, softmax, columns)
    return softmax.loss()


def compiled_loss(
    logits_CP: Tensor,
    labels_C: Tensor,
    weight_C: Tensor,
    columns: Columns,
    group: Group,
    gradients: bool,
    log_C: Tensor | None = None,
) -> Tensor:
    """Loss of each token; with ``gradients`` the logits become the gradient of the weighted loss.
    A label that is no column of this rank must be negative. ``log_C`` is filled with the logarithm
    of the softmax's denominator."""
    # torch compiles a view again for every shape of what it is a view of.
    logits_CP, labels_C, weight_C = (x.detach() for x in (logits_CP, labels_C, weight_C))
    if group.size == 1 and gradients and log_C is None:
        return compiled(loss_and_gradient)(logits_CP, labels_C, weight_C, columns)
    softmax = Softmax(*compiled(softmax_of)(logits_CP, labels_C, columns))
    if group.size > 1:
        softmax = softmax.over_ranks(group)
    if gradients:
        compiled(write_gradient)(logits_CP, labels_C, weight_C, softmax, columns)
    if log_C is not None:
        log_C.copy_(softmax.log_denominator())
    return softmax.loss()


def eager_loss(
    logits_CV: Tensor,
    labels_C: Tensor,
    columns: Columns,
    group: Group,
    gradients: bool,
    log_C: Tensor | None = None,
) -> Tensor:
    """Loss of each token; with ``gradients`` the logits become softmax - label. ``log_C`` is filled
    with the logarithm of the softmax's denominator."""
    work = torch.promote_types(logits_CV.dtype, torch.float32)
    absent_C = (labels_C < 0) | (labels_C >= logits_CV.shape[1])
    columns_C = labels_C.masked_fill(absent_C, 0)
    norm_C = torch.empty_like(labels_C, dtype=work) if log_C is None else log_C
    if not logits_CV.shape[1]:
        return _loss_over_ranks(norm_C.fill_(-torch.inf), torch.zeros_like(norm_C), group)
    target_C = logits_CV.new_empty(len(labels_C), dtype=work)
    alone, rows, z = group.size == 1, list(_rows(logits_CV)), columns.z_coeff
    for at in rows:
        logits_RV = capped(logits_CV[at].to(work), columns.softcap)
        target_C[at] = logits_RV.gather(1, columns_C[at, None]).squeeze(1)
        if not (alone and gradients):
            norm_C[at] = logits_RV.logsumexp(-1)
            continue
        # One pass instead of two: the largest probability gives the normaliser.
        slope_RV, largest_R = _slope(logits_RV, columns.softcap), logits_RV.amax(-1)
        softmax_RV = torch.softmax(logits_RV, -1, out=logits_RV)
        norm_C[at] = largest_R - softmax_RV.amax(-1).log()
        _write(logits_CV[at], softmax_RV, slope_RV, columns_C[at], absent_C[at], z, norm_C[at])
    target_C.masked_fill_(absent_C, 0.0)
    loss_C = norm_C - target_C if alone else _loss_over_ranks(norm_C, target_C, group)
    if gradients and not alone:
        for at in rows:
            logits_RV = capped(logits_CV[at].to(work), columns.softcap)
            slope_RV = _slope(logits_RV, columns.softcap)
            softmax_RV = logits_RV.sub_(norm_C[at, None]).exp_()
            _write(logits_CV[at], softmax_RV, slope_RV, columns_C[at], absent_C[at], z, norm_C[at])
    return loss_C


def score_chunk(
    logits_CV: Tensor, labels_C: Tensor, columns: Columns, softmax: Softmax, best_C: Tensor
) -> None:
    """Fills in what this rank knows of each token's softmax, and which of its columns has the
    largest logit, the first if there are several. A label may be no column of this rank."""
    absent_C = (labels_C < 0) | (labels_C >= logits_CV.shape[1])
    columns_C = labels_C.masked_fill(absent_C, 0)
    if not logits_CV.shape[1]:
        softmax.largest_C.fill_(-torch.inf)
        return
    for at in _rows(logits_CV):
        logits_RV = capped(logits_CV[at].to(softmax.total_C.dtype), columns.softcap)
        softmax.target_C[at] = logits_RV.gather(1, columns_C[at, None]).squeeze(1)
        softmax.largest_C[at], best_C[at] = logits_RV.max(-1)
        softmax.total_C[at] = logits_RV.sub_(softmax.largest_C[at, None]).exp_().sum(-1)
    softmax.target_C.masked_fill_(absent_C, 0.0)


def _rows(logits_CV: Tensor) -> Iterator[slice]:
    rows = len(logits_CV)
    if logits_CV.device.type == "cpu":
        rows = rows_of_work(logits_CV.shape[1])
    return slices(len(logits_CV), rows)


def _write(
    place_RV: Tensor,
    softmax_RV: Tensor,
    slope_RV: Tensor | None,
    columns_R: Tensor,
    absent_R: Tensor,
    z_coeff: float,
    norm_R: Tensor,
) -> None:
    """Replaces logits by the gradient of each token's loss."""
    if z_coeff:
        softmax_RV.mul_(1.0 + 2.0 * z_coeff * norm_R[:, None])
    at_label_R = absent_R.to(softmax_RV.dtype) - 1.0
    softmax_RV.scatter_add_(1, columns_R[:, None], at_label_R[:, None])
    if slope_RV is not None:
        softmax_RV.mul_(slope_RV)
    place_RV.copy_(softmax_RV)


def _loss_over_ranks(norm_C: Tensor, target_C: Tensor, group: Group) -> Tensor:
    if group.size > 1:
        largest_C = norm_C.clone()
        dist.all_reduce(largest_C, op=dist.ReduceOp.MAX, group=group.handle)
        sums_2C = torch.stack([(norm_C - largest_C).exp(), target_C])
        dist.all_reduce(sums_2C, group=group.handle)
        target_C = sums_2C[1]
        norm_C.copy_(largest_C + sums_2C[0].log())
    return norm_C - target_C


def rows_of_work(columns: int) -> int:
    """Rows of float32 numbers that a CPU works on at a time."""
    return max(1, WORK_BYTES // (4 * columns))


def slices(length: int, step: int) -> Iterator[slice]:
    """0 to ``length`` in steps; the last may be shorter."""
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
