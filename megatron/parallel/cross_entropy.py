"""Cross entropy of a linear map onto a vocabulary, without all of the logits in memory.

The forward pass computes, chunk of tokens by chunk, the logits, the loss, and the gradients of the
input and of the weight; the next chunk reuses the memory of the logits. There are the same three
GEMMs as with all logits at once; the backward pass only scales.

Shapes: B batch, S sequence (outside the region a rank's slice of it if that is split), T tokens
(B x S), C tokens of a chunk, R rows of a chunk, H hidden, P one rank's share of the padded
vocabulary, V those of P that are tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.config.parallel import LOGITS_CHUNK_MIB
from megatron.parallel.mesh import Group
from megatron.parallel.tensor_parallel import (
    TensorParallel,
    autocast_dtype,
    start_all_reduce,
    start_gather_sequence,
    start_scatter_sequence,
)

WORK_BYTES = 2 * 2**20
"""Size of the float32 work space on CPUs, which fits into a core's caches."""


class Targets(NamedTuple):
    """Token ids (int64) that a model should predict, and a mask: 1 where the loss counts, else
    0."""

    labels_BS: Tensor
    mask_BS: Tensor


@dataclass(frozen=True)
class LossHead:
    """How hidden states become a loss.

    Attributes:
        softcap: logits are softcap x tanh(logit / softcap); None leaves them alone.
        chunk_bytes: size of the logits in memory at a time; 0 for all; None for a default that
            suits the device.
    """

    vocab_size: int
    softcap: float | None
    chunk_bytes: int | None
    tp: TensorParallel

    def capped(self, logits: Tensor) -> Tensor:
        cap = self.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


def linear_cross_entropy(x_BSH: Tensor, weight: Tensor, targets: Targets, head: LossHead) -> Tensor:
    """Mean of -log softmax(x weight^T)[label] over the tokens whose mask is 1, zero if none is: a
    scalar, float32 or float64, the same on every rank. Hidden states are the same on every rank or,
    in a split region, this rank's slice; the weight is this rank's rows of the vocabulary, padding
    included; targets are those of the whole sequence."""
    return _LinearCrossEntropy.apply(x_BSH, weight, targets, head, torch.is_grad_enabled())


class _LinearCrossEntropy(torch.autograd.Function):
    # ZeRO 3 frees the weight after the forward pass; the backward pass does not need it.

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Targets, head: LossHead, training: bool
    ) -> Tensor:
        dtype, tp = autocast_dtype(x), head.tp
        with torch.autocast(x.device.type, enabled=False):
            sliced = x.to(dtype)
            whole = start_gather_sequence(sliced, tp.group)() if tp.split else sliced
            run = _Chunks(whole.flatten(0, 1), weight.to(dtype), targets, head)
            x_needs, weight_needs = (training and needs for needs in ctx.needs_input_grad[:2])
            x_grad = torch.empty_like(run.x_TH) if x_needs else None
            weight_grad = run.new_weight_gradient() if weight_needs else None
            loss = run.loss(x_grad, weight_grad)
        ctx.save_for_backward(x_grad, weight_grad)
        ctx.head, ctx.shape, ctx.counted = head, whole.shape, run.counted
        ctx.dtypes = x.dtype, weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_grad, weight_grad = ctx.saved_tensors
        tp = ctx.head.tp
        # One dimension, since torch on GPUs rounds a factor without dimensions to the dtype of what
        # it multiplies, which would scale all gradients slightly.
        factor = (grad / ctx.counted).view(1)
        if x_grad is not None:
            x_grad = x_grad.view(ctx.shape)
            if tp.group.size > 1:
                start = start_scatter_sequence if tp.split else start_all_reduce
                x_grad = start(x_grad, tp.group)()
            # In place: a second backward pass is an error.
            x_grad = x_grad.mul_(factor).to(ctx.dtypes[0])
        if weight_grad is not None:
            weight_grad = weight_grad.mul_(factor).to(ctx.dtypes[1])
        return x_grad, weight_grad, None, None, None


class _Chunks:
    """The tokens of a micro batch, chunk by chunk. The gradients are those of ``counted`` (tokens
    whose mask is 1, at least 1) x loss: each token has weight 1, which 16 bits represent well."""

    def __init__(self, x_TH: Tensor, weight_PH: Tensor, targets: Targets, head: LossHead) -> None:
        self.x_TH, self.weight_PH, self.head = x_TH, weight_PH, head
        self.work = torch.promote_types(x_TH.dtype, torch.float32)
        rows, size = len(weight_PH), head.chunk_bytes
        if size is None:
            size = LOGITS_CHUNK_MIB["cpu" if x_TH.device.type == "cpu" else "cuda"] * 2**20
        most = max(1, size // (rows * x_TH.element_size())) if size else len(x_TH)
        self.chunks = _even_slices(len(x_TH), most)
        first = head.tp.group.rank * rows
        self.used = max(0, min(rows, head.vocab_size - first))
        self.labels_T = targets.labels_BS.flatten() - first
        self.mask_T = targets.mask_BS.flatten().to(self.work)
        self.counted = self.mask_T.sum().clamp(min=1.0)

    def new_weight_gradient(self) -> Tensor:
        """Memory for it, in a dtype in which the chunks' gradients can be added."""
        dtype = self.work if len(self.chunks) > 1 else self.x_TH.dtype
        return torch.empty_like(self.weight_PH, dtype=dtype)

    def loss(self, x_grad_TH: Tensor | None, weight_grad_PH: Tensor | None) -> Tensor:
        """The mean loss; fills in the gradients that are not None."""
        total = torch.zeros((), dtype=self.work, device=self.x_TH.device)
        memory_CP = self.x_TH.new_empty(self.chunks[0].stop, len(self.weight_PH))
        gradients = x_grad_TH is not None or weight_grad_PH is not None
        for chunk in self.chunks:
            x_CH, mask_C = self.x_TH[chunk], self.mask_T[chunk]
            # With the padding, whose width suits GEMMs.
            logits_CP = memory_CP[: len(x_CH)]
            torch.mm(x_CH, self.weight_PH.t(), out=logits_CP)
            logits_CP[:, self.used :] = 0.0
            loss_C = self._step(logits_CP[:, : self.used], self.labels_T[chunk], gradients)
            total += loss_C @ mask_C
            if x_grad_TH is not None:
                torch.mm(logits_CP, self.weight_PH, out=x_grad_TH[chunk])
                x_grad_TH[chunk] *= mask_C[:, None]
            if weight_grad_PH is not None:
                shared_CH = (x_CH * mask_C[:, None]).to(x_CH.dtype)
                if len(self.chunks) == 1:
                    torch.mm(logits_CP.t(), shared_CH, out=weight_grad_PH)
                elif chunk.start == 0:
                    weight_grad_PH.copy_(logits_CP.t() @ shared_CH)
                else:
                    _add(weight_grad_PH, logits_CP.t() @ shared_CH)
        return total / self.counted

    def _step(self, logits_CV: Tensor, labels_C: Tensor, gradients: bool) -> Tensor:
        """Loss of each token; with ``gradients`` the logits become softmax - label."""
        group = self.head.tp.group
        absent_C = (labels_C < 0) | (labels_C >= logits_CV.shape[1])
        columns_C = labels_C.masked_fill(absent_C, 0)
        if not logits_CV.shape[1]:
            norm_C = torch.full_like(labels_C, -torch.inf, dtype=self.work)
            target_C = torch.zeros_like(norm_C)
            return _over_ranks(norm_C, target_C, group)
        norm_C, target_C = (logits_CV.new_empty(len(labels_C), dtype=self.work) for _ in range(2))
        alone, rows = group.size == 1, list(self._rows(logits_CV))
        for at in rows:
            logits_RV = self._capped(logits_CV[at])
            target_C[at] = logits_RV.gather(1, columns_C[at, None]).squeeze(1)
            if not (alone and gradients):
                norm_C[at] = logits_RV.logsumexp(-1)
                continue
            # One pass instead of two: the largest probability gives the normaliser.
            slope_RV, largest_R = self._slope(logits_RV), logits_RV.amax(-1)
            softmax_RV = torch.softmax(logits_RV, -1, out=logits_RV)
            norm_C[at] = largest_R - softmax_RV.amax(-1).log()
            self._write(logits_CV[at], softmax_RV, slope_RV, columns_C[at], absent_C[at])
        target_C.masked_fill_(absent_C, 0.0)
        loss_C = norm_C - target_C if alone else _over_ranks(norm_C, target_C, group)
        if gradients and not alone:
            for at in rows:
                logits_RV = self._capped(logits_CV[at])
                slope_RV = self._slope(logits_RV)
                softmax_RV = logits_RV.sub_(norm_C[at, None]).exp_()
                self._write(logits_CV[at], softmax_RV, slope_RV, columns_C[at], absent_C[at])
        return loss_C

    def _rows(self, logits_CV: Tensor) -> Iterator[slice]:
        rows = len(logits_CV)
        if logits_CV.device.type == "cpu":
            rows = max(1, WORK_BYTES // (4 * logits_CV.shape[1]))
        return _slices(len(logits_CV), rows)

    def _capped(self, logits_RV: Tensor) -> Tensor:
        """The logits in the dtype of the work; they may be overwritten."""
        return self.head.capped(logits_RV.to(self.work))

    def _slope(self, capped_RV: Tensor) -> Tensor | None:
        """Derivative of the softcap, before the logits are overwritten."""
        cap = self.head.softcap
        return None if cap is None else 1.0 - (capped_RV / cap).square_()

    @staticmethod
    def _write(
        place_RV: Tensor,
        softmax_RV: Tensor,
        slope_RV: Tensor | None,
        columns_R: Tensor,
        absent_R: Tensor,
    ) -> None:
        """Replaces logits by the gradient of each token's loss."""
        at_label_R = absent_R.to(softmax_RV.dtype) - 1.0
        softmax_RV.scatter_add_(1, columns_R[:, None], at_label_R[:, None])
        if slope_RV is not None:
            softmax_RV.mul_(slope_RV)
        place_RV.copy_(softmax_RV)


def _add(sum_PH: Tensor, addend_PH: Tensor) -> None:
    """In place. On a CPU torch would first copy the whole addend into the dtype of the sum."""
    rows = len(sum_PH)
    if sum_PH.device.type == "cpu":
        rows = max(1, WORK_BYTES // (4 * sum_PH.shape[1]))
    for at in _slices(len(sum_PH), rows):
        sum_PH[at] += addend_PH[at]


def _over_ranks(norm_C: Tensor, target_C: Tensor, group: Group) -> Tensor:
    if group.size > 1:
        largest_C = norm_C.clone()
        dist.all_reduce(largest_C, op=dist.ReduceOp.MAX, group=group.handle)
        sums_2C = torch.stack([(norm_C - largest_C).exp(), target_C])
        dist.all_reduce(sums_2C, group=group.handle)
        target_C = sums_2C[1]
        norm_C.copy_(largest_C + sums_2C[0].log())
    return norm_C - target_C


def _even_slices(length: int, most: int) -> list[slice]:
    count = -(-length // most)
    return list(_slices(length, -(-length // count)))


def _slices(length: int, step: int) -> Iterator[slice]:
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
