"""Cross entropy of a projection onto the vocabulary, without all logits in memory at once.

The forward pass processes one chunk of tokens at a time. It computes the chunk's logits and loss,
and the gradients of the input and the weight. The next chunk reuses the memory of the logits. These
are the same three GEMMs as with all logits at once, and the backward pass only scales the
gradients. The loss and gradient for a chunk's logits are computed in softmax_loss.py.

Shapes: B batch, S sequence (outside tensor-parallel layers, a rank's slice of it if split), T
tokens (B x S), C tokens of a chunk, H hidden, P one rank's share of the padded vocabulary.
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
from megatron.parallel.loss_head import LossHead, Targets
from megatron.parallel.softmax_loss import Columns, compiled_loss, compiles_for, eager_loss, slices
from megatron.parallel.tensor_parallel import TensorParallel, autocast_dtype

LOGITS_CHUNK_MIB = {"cpu": 64, "cuda": 256}
"""Default of ``--logits-chunk-mib`` if the loss is not compiled. Each chunk adds to the token
embedding's float32 gradient, which costs relatively more on a GPU."""

COMPILED_CHUNK_TOKENS, COMPILED_CHUNK_MIB, TOKENS_MULTIPLE = 8192, 2560, 256
"""Limits of a chunk if the loss is compiled: maximum tokens, maximum MiB, and the multiple to which
the number of tokens is rounded (the tile size of GEMMs). GEMMs over fewer tokens are slower."""


def linear_cross_entropy(
    x_BSH: Tensor, weight: Tensor, targets: Targets, head: LossHead, bias: Tensor | None = None
) -> Tensor:
    """Return the mean of -log softmax(x weight^T + bias)[label] over the tokens with mask 1, or 0
    if no token has: a float32 or float64 scalar, the same on every rank. ``x_BSH`` is the same on
    every rank or, with sequence parallelism, this rank's slice. ``weight`` and ``bias`` are this
    rank's vocabulary rows, including padding. ``targets`` are those of the whole sequence or of a
    context rank's chunks, whose sum is divided by the mask's sum over the whole sequence."""
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
    """Return the losses that a class of chunks computes. Other arguments are those of
    :func:`linear_cross_entropy`. Only the first loss has a gradient."""
    make = partial(chunks, targets=targets, head=head)
    numbers: tuple[Tensor, ...] = ChunkedCrossEntropy.apply(
        x_BSH, weight, bias, head, make, torch.is_grad_enabled()
    )
    return numbers if targets.whole is None else tuple(map(head.tp.context.sum, numbers))


def as_computed(
    x_BSH: Tensor, weight: Tensor, bias: Tensor | None, tp: TensorParallel
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the hidden states of the whole sequence, the weight and the bias. With autocast, they
    are converted to its dtype for GEMMs."""
    dtype = autocast_dtype(x_BSH)
    x_BSH = x_BSH.to(dtype)
    whole = start_gather_sequence(x_BSH, tp.group)() if tp.split else x_BSH
    return whole, weight.to(dtype), None if bias is None else bias.to(dtype)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Losses of a micro batch, computed chunk by chunk. Only the first loss has a gradient: that of
    the mean over ``counted`` tokens. ``make`` builds the :class:`LogitChunks` from hidden states
    [T, H], weight, bias, and a flag for each of their gradients that is needed."""

    # The backward pass must not need the weight: ZeRO 3 frees it after the forward pass.

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
            # In place: a second backward pass is not supported anyway.
            x_grad = summed(x_grad.view(ctx.shape), ctx.head.tp).mul_(factor).to(ctx.dtypes[0])
        if weight_grad is not None and ctx.place is not None:
            weight_grad = ctx.place.add_scaled(weight_grad, factor)
        elif weight_grad is not None:
            weight_grad = scaled(weight_grad, factor, ctx.dtypes[1])
        if bias_grad is not None:
            bias_grad = scaled(bias_grad, factor, ctx.dtypes[2])
        return x_grad, weight_grad, bias_grad, *[None] * 3


class LogitChunks:
    """Tokens of a micro batch, processed in chunks. Gradients are None if not needed. They are the
    gradients of ``counted`` x the mean loss, where ``counted`` is the number of tokens with mask 1,
    at least 1. Each token then has weight 1, which 16-bit dtypes represent exactly."""

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
    """Buffer for the log of each token's softmax denominator. None if it is not needed."""
    logits_CP: Tensor
    x_grad_TH: Tensor | None
    weight_grad_PH: Tensor | None
    bias_grad_P: Tensor | None

    def _allocate(self, chunk_bytes: int | None) -> None:
        """Divide the tokens into chunks, and allocate the gradients and one chunk's logits. If GPU
        memory is short, halve the chunks, unless the user or other ranks determine their size."""
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
        """Allocate the gradients that are needed."""
        self.x_grad_TH = torch.empty_like(self.x_TH) if self.x_needs else None
        self.weight_grad_PH = self._new_weight_gradient() if self.weight_needs else None
        self.bias_grad_P = None
        if self.bias_needs:
            self.bias_grad_P = self.x_TH.new_zeros(len(self.weight_PH), dtype=self.work)

    def _new_weight_gradient(self) -> Tensor:
        """Allocate the weight's gradient, in a wide dtype if several chunks are summed."""
        dtype = self.work if len(self.chunks) > 1 else self.x_TH.dtype
        return torch.empty_like(self.weight_PH, dtype=dtype)

    def losses(self) -> tuple[Tensor, ...]:
        """Return the mean loss, and other values that features add. Also fill in the gradients."""
        total = torch.zeros((), dtype=self.work, device=self.x_TH.device)
        gradients = self.x_needs or self.weight_needs or self.bias_needs
        for chunk in self.chunks:
            mask_C = self.mask_T[chunk]
            loss_C, logits_CP = self.losses_of(chunk, gradients)
            total += loss_C @ mask_C
            if gradients:
                # The compiled loss has already multiplied the logits' gradient by the mask.
                self.multiply(chunk, logits_CP, None if self.compiled else mask_C)
        return (total / self.counted,)

    def losses_of(self, chunk: slice, gradients: bool) -> tuple[Tensor, Tensor]:
        """Return the loss of each token, [C], and the buffer of the logits, [C, P]. With
        ``gradients``, the buffer then contains the losses' gradient with respect to the logits."""
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

    def logits(self, chunk: slice) -> Tensor:
        """Return a chunk's logits [C, P], including padding, in a buffer that all chunks share."""
        x_CH = self.x_TH[chunk]
        logits_CP = self.logits_CP[: len(x_CH)]
        if self.bias_P is None:
            return torch.mm(x_CH, self.weight_PH.t(), out=logits_CP)
        return torch.addmm(self.bias_P, x_CH, self.weight_PH.t(), out=logits_CP)

    def multiply(self, chunk: slice, grad_CP: Tensor, weight_C: Tensor | None) -> None:
        """Compute the gradients of input, weight and bias from the logits' gradient, whose rows
        are multiplied by ``weight_C`` if given. Start with the first chunk, which overwrites the
        sums."""
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


_fitting: dict[torch.device, int] = {}
"""Chunk size, in tokens, that fitted into each GPU's memory after the default had not."""


def logits_chunk(
    device: str, token_bytes: int, chunk_bytes: int | None, compiled: bool
) -> tuple[int | None, int]:
    """Return the size of a chunk: the number of tokens whose logits are in memory at a time.

    Args:
        device: "cpu" or "cuda".
        token_bytes: size of a token's logits on one rank.
        chunk_bytes: the user's limit in bytes. 0 means all tokens at once, None the default.
        compiled: whether the loss is compiled.
    Returns:
        The maximum number of tokens (None for all), and the multiple to which it is rounded.
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
    """Return a scalar in the shape with which it multiplies gradients without being rounded."""
    # On GPUs it has one dimension: torch rounds a zero-dimensional factor to the dtype of the
    # other operand, which would scale all gradients slightly. On CPUs the products are equal, and
    # 16-bit products with a one-dimensional factor take ten times as long.
    return scalar if scalar.device.type == "cpu" else scalar.view(1)


def summed(x_grad_BSH: Tensor, tp: TensorParallel) -> Tensor:
    """Sum the input's gradient over the ranks. Each has the contribution of its vocabulary rows."""
    if tp.group.size == 1:
        return x_grad_BSH
    start = start_scatter_sequence if tp.split else start_all_reduce
    return start(x_grad_BSH, tp.group)()


def _column_sums(grad_CP: Tensor, weight_C1: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the sum [P] over the rows, each multiplied by its weight."""
    if grad_CP.device.type != "cpu":
        return (grad_CP if weight_C1 is None else grad_CP * weight_C1.to(grad_CP.dtype)).sum(
            0, dtype=dtype
        )
    # A few rows at a time: torch would first convert the whole 16-bit tensor to the sum's dtype.
    total_P = grad_CP.new_zeros(grad_CP.shape[1], dtype=dtype)
    for at in slices(len(grad_CP), rows_of_work(grad_CP.shape[1])):
        rows = grad_CP[at].to(dtype)
        total_P += rows.sum(0) if weight_C1 is None else weight_C1[at, 0] @ rows
    return total_P


def _even_slices(length: int, most: int, multiple: int) -> list[slice]:
    """Divide ``length`` into as few, almost equal slices of at most ``most`` as possible. All sizes
    but the last are multiples of ``multiple``, as ``most`` must be if less than ``length``."""
    count = -(-length // most)
    return list(slices(length, -(-length // (count * multiple)) * multiple))
