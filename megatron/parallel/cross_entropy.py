"""Cross entropy of a linear map onto a vocabulary, without all of the logits in memory.

The forward pass computes, chunk of tokens by chunk, the logits, the loss, and the gradients of the
input and of the weight; the next chunk reuses the memory of the logits. There are the same three
GEMMs as with all logits at once; the backward pass only scales. What happens to the logits of a
chunk is in softmax_loss.py.

Shapes: B batch, S sequence (outside the region a rank's slice of it if that is split), T tokens
(B x S), C tokens of a chunk, H hidden, P one rank's share of the padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.kernels.sums import (
    add_product,
    add_wider,
    adds_products,
    rows_of_work,
    scaled,
    sum_of,
)
from megatron.parallel.collectives import (
    start_all_reduce,
    start_gather_sequence,
    start_scatter_sequence,
)
from megatron.parallel.loss_head import LossHead, Targets, TokenScores
from megatron.parallel.mesh import Group
from megatron.parallel.softmax_loss import (
    Columns,
    Softmax,
    compiled_loss,
    compiles_for,
    eager_loss,
    of_ranks,
    score_chunk,
    slices,
)
from megatron.parallel.tensor_parallel import TensorParallel, autocast_dtype

LOGITS_CHUNK_MIB = {"cpu": 64, "cuda": 256}
"""Default of ``--logits-chunk-mib`` where the loss is not compiled. Each chunk adds to the gradient
of the token embedding in float32, which costs relatively more on a GPU."""

COMPILED_CHUNK_TOKENS, COMPILED_CHUNK_MIB, TOKENS_MULTIPLE = 8192, 2560, 256
"""Limits where it is compiled: most tokens, most MiB, and what the tokens are a multiple of, as the
tiles of GEMMs are. GEMMs of fewer tokens are slower, and there is no float32 copy of the logits."""


def linear_cross_entropy(
    x_BSH: Tensor, weight: Tensor, targets: Targets, head: LossHead, bias: Tensor | None = None
) -> Tensor:
    """Mean of -log softmax(x weight^T + bias)[label] over the tokens whose mask is 1, zero if none
    is: a scalar, float32 or float64, the same on every rank. Hidden states are the same on every
    rank or, in a split region, this rank's slice; weight and bias are this rank's rows of the
    vocabulary, padding included; targets are those of the whole sequence, or of a context rank's
    part of it, whose sum is divided by the mask of all."""
    (loss,) = chunked_losses(LogitChunks, x_BSH, weight, targets, head, bias)
    return loss


def chunked_losses(
    chunks: Callable[..., LogitChunks],
    x_BSH: Tensor,
    weight: Tensor,
    targets: Targets,
    head: LossHead,
    bias: Tensor | None,
) -> tuple[Tensor, ...]:
    """The numbers of a kind of chunks, with the arguments of :func:`linear_cross_entropy`; the
    first has a gradient, as in :class:`ChunkedCrossEntropy`."""
    make = partial(chunks, targets=targets, head=head)
    numbers: tuple[Tensor, ...] = ChunkedCrossEntropy.apply(
        x_BSH, weight, bias, head, make, torch.is_grad_enabled()
    )
    return numbers if targets.whole is None else tuple(map(head.tp.context.sum, numbers))


@torch.no_grad()
def linear_scores(
    x_BPH: Tensor, weight: Tensor, targets: Targets, head: LossHead, bias: Tensor | None = None
) -> TokenScores:
    """The score of every target, with the arguments of :func:`linear_cross_entropy`; the same on
    every rank."""
    whole, weight, bias = as_computed(x_BPH, weight, bias, head.tp)
    with torch.autocast(x_BPH.device.type, enabled=False):
        run = LogitChunks(whole.flatten(0, 1), weight, bias, targets, head, compiled=False)
        log_probs_T, best_T = run.scores()
    counts_BP = targets.mask_BS > 0
    correct_BP = (best_T == targets.labels_BS.flatten()).view(counts_BP.shape) & counts_BP
    log_probs_BP = log_probs_T.view(counts_BP.shape).masked_fill(~counts_BP, 0.0)
    if targets.whole is None:
        return TokenScores(log_probs_BP, correct_BP)
    whole_BP, right_BP = (
        targets.gathered(each, head.tp.context)
        for each in (log_probs_BP, correct_BP.to(log_probs_BP.dtype))
    )
    return TokenScores(whole_BP, right_BP > 0)


def as_computed(
    x_BSH: Tensor, weight: Tensor, bias: Tensor | None, tp: TensorParallel
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The hidden states of the whole sequence, the weight and the bias in the dtype that
    autocast, if it is on, has for products."""
    dtype = autocast_dtype(x_BSH)
    x_BSH = x_BSH.to(dtype)
    whole = start_gather_sequence(x_BSH, tp.group)() if tp.split else x_BSH
    return whole, weight.to(dtype), None if bias is None else bias.to(dtype)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Numbers of a micro batch, computed chunk by chunk, of which the first has a gradient: that of
    a mean over ``counted`` tokens. ``make`` makes the chunks, with the method ``losses``, of hidden
    states [T, H], weight, bias and which gradients are needed."""

    # ZeRO 3 frees the weight after the forward pass; the backward pass does not need it.

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: LossHead,
        make: Callable[..., LogitChunks],
        training: bool,
    ) -> tuple[Tensor, ...]:
        whole, *params = as_computed(x, weight, bias, head.tp)
        with torch.autocast(x.device.type, enabled=False):
            needs = [training and needed for needed in ctx.needs_input_grad[:3]]
            run = make(whole.flatten(0, 1), *params, needs=needs)
            loss, *others = run.losses()
        ctx.mark_non_differentiable(*others)
        ctx.save_for_backward(run.x_grad_TH, run.weight_grad_PH, run.bias_grad_P)
        ctx.head, ctx.shape, ctx.counted = head, whole.shape, run.counted
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.place = sum_of(weight)
        return loss, *others

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x_grad, weight_grad, bias_grad = ctx.saved_tensors
        factor = factor_of(grad / ctx.counted)
        if x_grad is not None:
            # In place: a second backward pass is an error.
            x_grad = summed(x_grad.view(ctx.shape), ctx.head.tp).mul_(factor).to(ctx.dtypes[0])
        if weight_grad is not None and ctx.place is not None:
            weight_grad = ctx.place.add_scaled(weight_grad, factor)
        elif weight_grad is not None:
            weight_grad = scaled(weight_grad, factor, ctx.dtypes[1])
        if bias_grad is not None:
            bias_grad = scaled(bias_grad, factor, ctx.dtypes[2])
        return x_grad, weight_grad, bias_grad, *[None] * 3


class LogitChunks:
    """The tokens of a micro batch, chunk by chunk. The gradients (None where not needed) are those
    of ``counted`` (tokens whose mask is 1, at least 1) x loss: each token has weight 1, which 16
    bits represent well."""

    def __init__(
        self,
        x_TH: Tensor,
        weight_PH: Tensor,
        bias_P: Tensor | None,
        targets: Targets,
        head: LossHead,
        needs: Sequence[bool] = (False, False, False),
        compiled: bool | None = None,
    ) -> None:
        self.x_TH, self.weight_PH, self.bias_P = x_TH, weight_PH, bias_P
        self.x_needs, self.weight_needs, self.bias_needs = needs
        self.group = head.tp.group
        self.work = torch.promote_types(x_TH.dtype, torch.float32)
        self.compiled = compiles_for(x_TH.device.type) if compiled is None else compiled
        rows = len(weight_PH)
        self.first = self.group.rank * rows
        used = max(0, min(rows, head.vocab_size - self.first))
        self.columns = Columns(used, head.softcap, head.z_coeff)
        self.targets = targets
        labels_T = targets.labels_BS.flatten() - self.first
        if self.compiled:
            labels_T = labels_T.masked_fill(labels_T >= self.columns.used, -1)
        self.labels_T = labels_T
        self.mask_T = targets.mask_BS.flatten().to(self.work)
        counted = self.mask_T if targets.whole is None else targets.whole.mask_BS.to(self.work)
        self.counted = counted.sum().clamp(min=1.0)
        self._allocate(head.chunk_bytes)

    log_T: Tensor | None = None
    """Memory for the logarithm of each softmax's denominator, where it is asked for."""
    logits_CP: Tensor
    x_grad_TH: Tensor | None
    weight_grad_PH: Tensor | None
    bias_grad_P: Tensor | None

    def _allocate(self, chunk_bytes: int | None) -> None:
        """Cuts the tokens into chunks, and takes the memory of one and of the gradients. Where that
        of a GPU is short, chunks are halved, unless the user or other ranks count on their size."""
        x_TH, rows = self.x_TH, len(self.weight_PH)
        kind = "cpu" if x_TH.device.type == "cpu" else "cuda"
        token_bytes = rows * x_TH.element_size()
        most, multiple = logits_chunk(kind, token_bytes, chunk_bytes, self.compiled)
        most = len(x_TH) if most is None else min(most, len(x_TH))
        flexible = chunk_bytes is None and self.compiled and self.group.size == 1
        if flexible:
            most = min(most, _fitting.get(x_TH.device, most))
        while True:
            self.chunks = _even_slices(len(x_TH), most, multiple)
            try:
                self.logits_CP = x_TH.new_empty(self.chunks[0].stop, rows)
                self.allocate_gradients()
                return
            except torch.OutOfMemoryError:
                if not flexible or most <= multiple:
                    raise
                self.logits_CP, self.x_grad_TH, self.weight_grad_PH = x_TH[:0], None, None
                most = -(-most // (2 * multiple)) * multiple
                _fitting[x_TH.device] = most
                print(f"loss: {most:,} tokens at a time, since memory is short", flush=True)

    def allocate_gradients(self) -> None:
        """Allocate the required ones."""
        self.x_grad_TH = torch.empty_like(self.x_TH) if self.x_needs else None
        self.weight_grad_PH = self._new_weight_gradient() if self.weight_needs else None
        self.bias_grad_P = None
        if self.bias_needs:
            self.bias_grad_P = self.x_TH.new_zeros(len(self.weight_PH), dtype=self.work)

    def _new_weight_gradient(self) -> Tensor:
        """Memory for it, in a dtype in which the chunks' gradients can be added."""
        dtype = self.work if len(self.chunks) > 1 else self.x_TH.dtype
        return torch.empty_like(self.weight_PH, dtype=dtype)

    def losses(self) -> tuple[Tensor, ...]:
        """The mean loss, and numbers that features add; fills in the gradients."""
        total = torch.zeros((), dtype=self.work, device=self.x_TH.device)
        gradients = self.x_needs or self.weight_needs or self.bias_needs
        for chunk in self.chunks:
            mask_C = self.mask_T[chunk]
            loss_C, logits_CP = self.losses_of(chunk, gradients)
            total += loss_C @ mask_C
            if gradients:
                # The mask is in the gradient of the logits if it was compiled.
                self.multiply(chunk, logits_CP, None if self.compiled else mask_C)
        return (total / self.counted,)

    def losses_of(self, chunk: slice, gradients: bool) -> tuple[Tensor, Tensor]:
        """The loss of each token, [C], and the memory of the logits, [C, P], with the gradient of
        these losses if that is asked for."""
        labels_C, used = self.labels_T[chunk], self.columns.used
        logits_CP, group = self.logits(chunk), self.group
        log_C = None if self.log_T is None else self.log_T[chunk]
        if self.compiled:
            mask_C = self.mask_T[chunk]
            loss_C = compiled_loss(
                logits_CP, labels_C, mask_C, self.columns, group, gradients, log_C
            )
        else:
            logits_CP[:, used:] = 0.0
            used_CV = logits_CP[:, :used]
            loss_C = eager_loss(used_CV, labels_C, self.columns, group, gradients, log_C)
        return loss_C, logits_CP

    def scores(self) -> tuple[Tensor, Tensor]:
        """The log-probability of each label, and the first of the most probable tokens, [T]."""
        used, count = self.columns.used, len(self.x_TH)
        softmax = Softmax(*(self.x_TH.new_zeros(count, dtype=self.work) for _ in Softmax._fields))
        best = BestTokens(self.labels_T, self.work)
        for chunk in self.chunks:
            into = Softmax(*(part[chunk] for part in softmax))
            logits_CV = self.logits(chunk)[:, :used]
            score_chunk(logits_CV, self.labels_T[chunk], self.columns, into, best.best_T[chunk])
        best.largest_T = softmax.largest_C
        if self.group.size > 1:
            softmax = softmax.over_ranks(self.group)
        return -softmax.loss(), best.over_ranks(self.first, self.group)

    def logits(self, chunk: slice) -> Tensor:
        """[C, P], with the padding, whose width suits GEMMs, in memory that the next overwrites."""
        x_CH = self.x_TH[chunk]
        logits_CP = self.logits_CP[: len(x_CH)]
        if self.bias_P is None:
            return torch.mm(x_CH, self.weight_PH.t(), out=logits_CP)
        return torch.addmm(self.bias_P, x_CH, self.weight_PH.t(), out=logits_CP)

    def multiply(self, chunk: slice, grad_CP: Tensor, weight_C: Tensor | None) -> None:
        """The gradients of the input, the weight and the bias from that of the logits, whose rows
        have these weights, or all weight 1. The first chunk comes first."""
        x_CH = self.x_TH[chunk]
        weight_C1 = None if weight_C is None else weight_C[:, None]
        if self.x_grad_TH is not None:
            torch.mm(grad_CP, self.weight_PH, out=self.x_grad_TH[chunk])
            if weight_C1 is not None:
                self.x_grad_TH[chunk] *= weight_C1
        if self.bias_grad_P is not None:
            self.bias_grad_P += _column_sums(grad_CP, weight_C1, self.work)
        if self.weight_grad_PH is None:
            return
        if weight_C1 is not None:
            x_CH = (x_CH * weight_C1).to(x_CH.dtype)
        if len(self.chunks) == 1:
            torch.mm(grad_CP.t(), x_CH, out=self.weight_grad_PH)
        elif adds_products(x_CH.device, x_CH.dtype, self.weight_grad_PH.dtype):
            add_product(self.weight_grad_PH, grad_CP, x_CH, 0 if chunk.start == 0 else 1)
        elif chunk.start == 0:
            self.weight_grad_PH.copy_(grad_CP.t() @ x_CH)
        else:
            add_wider(self.weight_grad_PH, grad_CP.t() @ x_CH)


class BestTokens:
    """The most probable token of each place, the first if there are several, and its logit."""

    def __init__(self, labels_T: Tensor, work: torch.dtype) -> None:
        self.best_T = torch.zeros_like(labels_T)
        self.largest_T = torch.full_like(labels_T, -torch.inf, dtype=work)

    def add(self, chunk: slice, logits_CV: Tensor) -> None:
        """Store the largest logits of this rank's columns, for the places of a chunk."""
        if logits_CV.shape[1]:
            largest_C, self.best_T[chunk] = logits_CV.max(-1)
            self.largest_T[chunk] = largest_C

    def over_ranks(self, first: int, group: Group) -> Tensor:
        """Return the columns of the largest logits of all ranks, where this rank's columns begin at
        ``first``."""
        best_T = self.best_T + first
        if group.size == 1:
            return best_T
        # Integers and the bits of numbers in one collective; float64 has every float32.
        bits_RT, best_RT = of_ranks(group, self.largest_T.double().view(torch.int64), best_T)
        largest_RT = bits_RT.view(torch.float64)
        best_RT = best_RT.masked_fill(
            largest_RT < largest_RT.amax(0), torch.iinfo(best_T.dtype).max
        )
        return best_RT.amin(0)


_fitting: dict[torch.device, int] = {}
"""Tokens of a chunk that fitted into a GPU's memory, where the default did not."""


def logits_chunk(
    device: str, token_bytes: int, chunk_bytes: int | None, compiled: bool
) -> tuple[int | None, int]:
    """Return the number of tokens whose logits are in memory at a time.

    Args:
        device: "cpu" or "cuda".
        token_bytes: size of a token's logits on one rank.
        chunk_bytes: what the user wants: at most so many bytes, or 0 for all tokens at once; None
            for the default.
        compiled: whether the loss is compiled.

    Returns:
        The most tokens (None: all), and what their number is rounded to a multiple of.
    """
    if chunk_bytes == 0:
        return None, 1
    if chunk_bytes is None and compiled:
        bounded = COMPILED_CHUNK_MIB * 2**20 // token_bytes
        most = min(COMPILED_CHUNK_TOKENS, bounded // TOKENS_MULTIPLE * TOKENS_MULTIPLE)
        return max(TOKENS_MULTIPLE, most), TOKENS_MULTIPLE
    size = LOGITS_CHUNK_MIB[device] * 2**20 if chunk_bytes is None else chunk_bytes
    return max(1, size // token_bytes), 1


def factor_of(scalar: Tensor) -> Tensor:
    """A number that gradients are multiplied by."""
    # One dimension, since torch on GPUs rounds a factor without dimensions to the dtype of what it
    # multiplies, which would scale all gradients slightly. On CPUs the products are the same, and
    # 16-bit ones with dimensions take ten times as long.
    return scalar if scalar.device.type == "cpu" else scalar.view(1)


def summed(x_grad_BSH: Tensor, tp: TensorParallel) -> Tensor:
    """The gradient of the input, of which each rank has that of its rows of the vocabulary."""
    if tp.group.size == 1:
        return x_grad_BSH
    start = start_scatter_sequence if tp.split else start_all_reduce
    return start(x_grad_BSH, tp.group)()


def _column_sums(grad_CP: Tensor, weight_C1: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[P], of the rows times their weights."""
    if grad_CP.device.type != "cpu":
        return (grad_CP if weight_C1 is None else grad_CP * weight_C1.to(grad_CP.dtype)).sum(
            0, dtype=dtype
        )
    # A few rows at a time: torch would first copy all of 16-bit numbers into the dtype of the sum.
    total_P = grad_CP.new_zeros(grad_CP.shape[1], dtype=dtype)
    for at in slices(len(grad_CP), rows_of_work(grad_CP.shape[1])):
        rows = grad_CP[at].to(dtype)
        total_P += rows.sum(0) if weight_C1 is None else weight_C1[at, 0] @ rows
    return total_P


def _even_slices(length: int, most: int, multiple: int) -> list[slice]:
    """As few as possible of at most ``most``, which is a multiple if it is less than the length."""
    count = -(-length // most)
    return list(slices(length, -(-length // (count * multiple)) * multiple))
