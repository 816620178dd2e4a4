"""Per-token values of a linear map onto a vocabulary, such as log-probabilities, without all logits
in memory at once.

The gradient of a value is known only in the backward pass, which needs the logits again. It has
those of one chunk, and computes those of other chunks a second time. If one chunk covers all
tokens, the cost is three GEMMs, as with all logits in memory. On CPUs the default chunk is larger
than that of :func:`linear_cross_entropy`, which computes nothing twice.

Shapes: B batch, P positions (in sequence parallelism a rank's slice of them), T tokens (B x P), C
tokens of a chunk, H hidden, V a rank's shard of the padded vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.parallel.cross_entropy import LogitChunks, as_computed, factor_of, scaled, summed
from megatron.parallel.loss_head import HeadInput, LossHead, Targets

KEPT_MIB = 256
"""Size of a chunk on CPUs, unless ``--logits-chunk-mib`` is given."""


class TokenWork(Protocol):
    """Computation of one or more differentiable values per token from :class:`LogitChunks`."""

    def read(self, training: bool) -> Sequence[Tensor]:
        """Return the values, [T] each, which are 0 for masked tokens. ``training`` is True if
        gradients will be requested."""
        ...

    def gradient(self, chunk: slice, parts_NT: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the gradient of a chunk's logits, [C, V], and weights of its rows, [C], or None if
        all are 1. ``parts_NT`` are the gradients of the N values, with the largest scaled to 1."""
        ...


def token_values(
    inputs: HeadInput, work: Callable[[LogitChunks], TokenWork], compiled: bool | None = None
) -> tuple[Tensor, ...]:
    """Return the values of ``work`` at every target of a head, [B, P] each. See
    :class:`LogitChunks` for ``compiled``. The values' gradients must be the same on every
    tensor-parallel rank."""
    x_BPH, weight_VH, bias_V, targets, head = inputs
    training, how = torch.is_grad_enabled(), (work, compiled)
    numbers: tuple[Tensor, ...] = _LinearTokens.apply(
        x_BPH, weight_VH, bias_V, targets, head, how, training
    )
    return numbers


def linear_log_probs(
    x_BPH: Tensor,
    weight_VH: Tensor,
    targets: Targets,
    head: LossHead,
    bias_V: Tensor | None = None,
) -> Tensor:
    """Return log softmax(x weight^T + bias)[label] at every target, [B, P], float32 or float64, 0
    where the mask is 0. The result is the same on every tensor-parallel rank, and its gradient must
    be too. The arguments are those of :func:`linear_cross_entropy`."""
    if head.chunk_bytes is None and x_BPH.device.type == "cpu":
        head = dataclasses.replace(head, chunk_bytes=KEPT_MIB * 2**20)
    (log_probs_BP,) = token_values(HeadInput(x_BPH, weight_VH, bias_V, targets, head), _LogProbs)
    return log_probs_BP


class _LogProbs:
    """Log-probabilities, computed as negative cross-entropy losses."""

    def __init__(self, run: LogitChunks) -> None:
        self._run = run

    def read(self, training: bool) -> Sequence[Tensor]:
        run, log_probs_T = self._run, torch.zeros_like(self._run.mask_T)
        for chunk in reversed(run.chunks):
            # The first chunk is last, because its logits stay in memory for the backward pass.
            kept = training and chunk is run.chunks[0]
            loss_C, _ = run.losses_of(chunk, gradients=kept)
            torch.mul(loss_C, -run.mask_T[chunk], out=log_probs_T[chunk])
        return (log_probs_T,)

    def gradient(self, chunk: slice, parts_NT: Tensor) -> tuple[Tensor, Tensor | None]:
        logits_CP = self._run.logits_CP
        if chunk is not self._run.chunks[0]:
            _, logits_CP = self._run.losses_of(chunk, gradients=True)
        # The sign changes because a loss is a negative log-probability.
        return logits_CP, -parts_NT[0, chunk]


class _LinearTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Targets,
        head: LossHead,
        how: tuple[Callable[[LogitChunks], TokenWork], bool | None],
        training: bool,
    ) -> tuple[Tensor, ...]:
        counted = targets.changed(mask_BS=targets.mask_BS > 0)
        whole, weight_VH, bias_V = as_computed(x, weight, bias, head.tp)
        training = training and any(ctx.needs_input_grad[:3])
        work, compiled = how
        with torch.autocast(x.device.type, enabled=False):
            x_TH = whole.flatten(0, 1)
            run = LogitChunks(x_TH, weight_VH, bias_V, counted, head, compiled=compiled)
            of_tokens = work(run)
            numbers = of_tokens.read(training)
        if training:
            ctx.run, ctx.work, ctx.head, ctx.shape = run, of_tokens, head, whole.shape
            # ZeRO stage 3 frees this weight, and gathers the parameter again in the backward pass.
            run.weight_PH = run.bias_P = None  # type: ignore[assignment]
            ctx.save_for_backward(weight, bias)
            ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return tuple(each.view(targets.mask_BS.shape) for each in numbers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads_BP: Tensor) -> tuple[Tensor | None, ...]:
        run, work = ctx.run, ctx.work
        weight, bias = ctx.saved_tensors
        dtype = run.x_TH.dtype
        run.weight_PH = weight.to(dtype)
        run.bias_P = None if bias is None else bias.to(dtype)
        run.x_needs, run.weight_needs, run.bias_needs = ctx.needs_input_grad[:3]
        # Scale the largest to 1: gradients of a mean over many tokens are too small for 16 bits.
        parts_NT = torch.stack([each.flatten() for each in grads_BP]).to(run.work) * run.mask_T
        largest = parts_NT.abs().amax().clamp(min=torch.finfo(run.work).tiny)
        parts_NT /= largest
        with torch.autocast(run.x_TH.device.type, enabled=False):
            run.allocate_gradients()
            for chunk in run.chunks:
                run.multiply(chunk, *work.gradient(chunk, parts_NT))
        x_grad, *others = run.x_grad_TH, run.weight_grad_PH, run.bias_grad_P
        del ctx.run, ctx.work, run, work  # frees the logits
        if x_grad is not None:
            x_grad = summed(x_grad.view(ctx.shape), ctx.head.tp)
        factor = factor_of(largest)
        grads = (
            None if grad is None else scaled(grad, factor, dtype)
            for grad, dtype in zip((x_grad, *others), ctx.dtypes, strict=True)
        )
        return *grads, None, None, None, None
