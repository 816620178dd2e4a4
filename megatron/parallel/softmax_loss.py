"""Cross entropy of a chunk of logits, and its gradient, which overwrites the logits.

There are two implementations. On CPUs, torch's own functions process a few rows at a time, in a
float32 buffer that fits into a core's caches. On GPUs with a compiler, the whole chunk is compiled
into kernels that keep only 16-bit logits in memory, which they read twice and write once. Between
the two reads, tensor-parallel ranks exchange their partial softmaxes.

Shapes: C tokens of the chunk, R rows of them, P columns of logits on this rank, V columns of these
that are tokens and not padding, T tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.kernels.compiler import allow_graphs, missing_compiler
from megatron.kernels.sums import rows_of_work
from megatron.parallel.collectives import start_gather
from megatron.parallel.mesh import Group
from megatron.util.processes import is_main_process

GRAPHS = 64
"""Maximum number of compiled versions of a function. With torch's default of 8, a run whose number
of tokens varies, for example with a curriculum, would end with an error."""


class Columns(NamedTuple):
    """Columns of this rank's logits, and how they enter the loss.

    Attributes:
        used: number of columns that are tokens (V). The others are padding.
        softcap: see :func:`capped`.
        z_coeff: factor of the z-loss, the squared logarithm of the softmax denominator. Only its
          gradient is added, not its value (Chowdhery et al. 2022, arXiv:2204.02311, section 5).
    """

    used: int
    softcap: float | None
    z_coeff: float = 0.0


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return softcap x tanh(logit / softcap), or the logits unchanged if ``softcap`` is None."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _slope(capped_logits: Tensor, softcap: float | None) -> Tensor | None:
    """Return the derivative of the softcap, computed from its output."""
    return None if softcap is None else 1.0 - (capped_logits / softcap).square_()


class Softmax(NamedTuple):
    """Partial softmax of each token: the largest logit, the sum of exp(logit - largest), and the
    label's logit (0 if another rank has it), each [C], in the dtype of the computation."""

    largest_C: Tensor
    total_C: Tensor
    target_C: Tensor

    def loss(self) -> Tensor:
        """Return -log softmax at the label, [C]."""
        return (self.largest_C - self.target_C) + self.total_C.log()

    def log_denominator(self) -> Tensor:
        """Return the logarithm of the softmax denominator, [C]."""
        return self.largest_C + self.total_C.log()

    def over_ranks(self, group: Group) -> Softmax:
        """Return the softmax over all ranks' columns, given this rank's columns. Collective."""
        largest_TC, total_TC, target_TC = of_ranks(group, *self)
        largest_C = largest_TC.amax(0)
        total_C = (total_TC * (largest_TC - largest_C).exp()).sum(0)
        return Softmax(largest_C, total_C, target_TC.sum(0))


def of_ranks(group: Group, *rows_C: Tensor) -> tuple[Tensor, ...]:
    """All-gather tensors [C] of one dtype in one collective, each as [ranks, C]. Values computed
    from the result agree bit for bit on all ranks, which an all-reduce would not guarantee."""
    parts = start_gather(torch.stack(rows_C)[None], group)()
    return parts.unbind(1)


@cache
def compiles_for(device_type: str) -> bool:
    """Return whether the loss is compiled on this type of device. If a GPU lacks the compiler,
    print a line. On CPUs, return False without a check, which would import torch's compiler."""
    if device_type != "cuda":
        return False
    missing = missing_compiler(device_type)
    if missing is not None and is_main_process():
        print(f"loss: {missing}; it is computed eagerly, with more memory and traffic", flush=True)
    return missing is None


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return one of the functions below, compiled for the first number of tokens it gets. A second
    number triggers one compilation for all other numbers."""
    allow_graphs(GRAPHS)
    return torch.compile(function, fullgraph=True)


def softmax_of(logits_CP: Tensor, labels_C: Tensor, columns: Columns) -> Softmax:
    """Return the partial softmax, reading the logits once. Other ranks' labels must be negative."""
    # torch's compiler fuses a maximum and a sum of exponentials over one dimension into one loop
    # (online softmax; Milakov and Gimelshein 2018, arXiv:1805.02867).
    capped_CP = _used(capped(_wide(logits_CP), columns.softcap), columns)
    largest_C1 = capped_CP.amax(-1, keepdim=True)
    total_C1 = (capped_CP - largest_C1).exp().sum(-1, keepdim=True)
    target_C = _wide(logits_CP.gather(1, labels_C.clamp(min=0)[:, None])).squeeze(1)
    target_C = torch.where(labels_C >= 0, capped(target_C, columns.softcap), 0.0)
    return Softmax(largest_C1.squeeze(1), total_C1.squeeze(1), target_C)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _used(capped_CP: Tensor, columns: Columns) -> Tensor:
    """Mask the padding with the lowest finite number, since -inf minus -inf is NaN."""
    width = capped_CP.shape[1]
    if columns.used == width:
        return capped_CP
    number_P = torch.arange(width, device=capped_CP.device)
    return torch.where(number_P < columns.used, capped_CP, torch.finfo(capped_CP.dtype).min)


def write_gradient(
    logits_CP: Tensor, labels_C: Tensor, weight_C: Tensor, softmax: Softmax, columns: Columns
) -> None:
    """Overwrite the logits with the gradient of each token's loss times its weight, and padding
    with zeros, in one read and one write."""
    capped_CP = capped(_wide(logits_CP), columns.softcap)
    slope_CP = _slope(capped_CP, columns.softcap)
    # Subtract the largest logit rather than the log-sum-exp, whose rounding error is larger.
    share_C = softmax.total_C.reciprocal()
    if columns.z_coeff:
        share_C = share_C * (1.0 + 2.0 * columns.z_coeff * softmax.log_denominator())
    number_P = torch.arange(logits_CP.shape[1], device=logits_CP.device)
    softmax_CP = (capped_CP - softmax.largest_C[:, None]).exp() * share_C[:, None]
    grad_CP = softmax_CP - (number_P == labels_C[:, None]).to(softmax_CP.dtype)
    if slope_CP is not None:
        grad_CP = grad_CP * slope_CP
    grad_CP = grad_CP * weight_C[:, None]
    if columns.used < logits_CP.shape[1]:
        grad_CP = torch.where(number_P < columns.used, grad_CP, 0.0)
    logits_CP.copy_(grad_CP)


def loss_and_gradient(
    logits_CP: Tensor, labels_C: Tensor, weight_C: Tensor, columns: Columns
) -> Tensor:
    """Return each token's loss. Overwrite its logits with the gradient of its weighted loss."""
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
    """Return the loss of each token. With ``gradients``, overwrite the logits with the gradient of
    the weighted loss. Labels of other ranks must be negative. If given, ``log_C`` is filled with
    the logarithm of the softmax denominator."""
    # Detach, because torch recompiles for a view whenever the shape of its base changes.
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
    """Return the loss of each token. With ``gradients``, overwrite the logits with the gradient of
    the loss. If given, ``log_C`` is filled with the logarithm of the softmax denominator."""
    work = torch.promote_types(logits_CV.dtype, torch.float32)
    absent_C = (labels_C < 0) | (labels_C >= logits_CV.shape[1])
    columns_C = labels_C.masked_fill(absent_C, 0)
    norm_C = torch.empty_like(labels_C, dtype=work) if log_C is None else log_C
    if not logits_CV.shape[1]:
        return _loss_over_ranks(norm_C.fill_(-torch.inf), torch.zeros_like(norm_C), group)
    target_C = logits_CV.new_empty(len(labels_C), dtype=work)
    alone, rows, z = group.size == 1, list(rows_at_a_time(logits_CV)), columns.z_coeff
    for at in rows:
        logits_RV = capped(logits_CV[at].to(work), columns.softcap)
        target_C[at] = logits_RV.gather(1, columns_C[at, None]).squeeze(1)
        if not (alone and gradients):
            norm_C[at] = logits_RV.logsumexp(-1)
            continue
        # One pass instead of two: the log-sum-exp follows from the largest logit and probability.
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


def rows_at_a_time(logits_CV: Tensor) -> Iterator[slice]:
    """Yield slices of the rows of logits that are processed at a time."""
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
    """Overwrite logits with the gradient of each token's loss. Also overwrites ``softmax_RV``."""
    if z_coeff:
        softmax_RV.mul_(1.0 + 2.0 * z_coeff * norm_R[:, None])
    at_label_R = absent_R.to(softmax_RV.dtype) - 1.0
    softmax_RV.scatter_add_(1, columns_R[:, None], at_label_R[:, None])
    if slope_RV is not None:
        softmax_RV.mul_(slope_RV)
    place_RV.copy_(softmax_RV)


def _loss_over_ranks(norm_C: Tensor, target_C: Tensor, group: Group) -> Tensor:
    if group.size > 1:
        norm_TC, target_TC = of_ranks(group, norm_C, target_C)
        largest_C, target_C = norm_TC.amax(0), target_TC.sum(0)
        norm_C.copy_(largest_C + (norm_TC - largest_C).exp().sum(0).log())
    return norm_C - target_C


def slices(length: int, step: int) -> Iterator[slice]:
    """Yield consecutive slices of ``step`` elements up to ``length``. The last may be shorter."""
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
