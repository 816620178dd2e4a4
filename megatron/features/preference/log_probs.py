"""Log-probabilities of tokens under a linear map onto a vocabulary, without all of the logits in
memory.

The gradient of each comes with the backward pass, when it is known what depends on it: then the
logits are needed again. Those of one chunk are kept; what is beyond is computed a second time.
Where one chunk is all, there are the same three GEMMs as with all logits at once. On CPUs a chunk
is larger than that of :func:`linear_cross_entropy`, which computes nothing twice.

Shapes: B batch, P positions (outside the region a rank's slice of them if that is split), T tokens
(B x P), C tokens of a chunk, H hidden, V one rank's share of the padded vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.parallel.cross_entropy import (
    LogitChunks,
    as_computed,
    factor_of,
    scaled,
    summed,
)
from megatron.parallel.loss_head import LossHead, Targets

KEPT_MIB = 256
"""Size of a chunk on CPUs, where ``--logits-chunk-mib`` does not say."""


def linear_log_probs(
    x_BPH: Tensor,
    weight_VH: Tensor,
    targets: Targets,
    head: LossHead,
    bias_V: Tensor | None = None,
) -> Tensor:
    """log softmax(x weight^T + bias)[label] of every target, [B, P], float32 or float64, 0 where
    its mask is 0; the same on every tensor-parallel rank, and so must be the gradient that it gets.
    The arguments are those of :func:`linear_cross_entropy`."""
    return _LinearLogProbs.apply(x_BPH, weight_VH, bias_V, targets, head, torch.is_grad_enabled())


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Targets,
        head: LossHead,
        training: bool,
    ) -> Tensor:
        if head.chunk_bytes is None and x.device.type == "cpu":
            head = dataclasses.replace(head, chunk_bytes=KEPT_MIB * 2**20)
        counted = Targets(targets.labels_BS, targets.mask_BS > 0, *targets[2:])
        whole, weight_VH, bias_V = as_computed(x, weight, bias, head.tp)
        with torch.autocast(x.device.type, enabled=False):
            run = LogitChunks(whole.flatten(0, 1), weight_VH, bias_V, counted, head)
            training = training and any(ctx.needs_input_grad[:3])
            log_probs_T = torch.zeros_like(run.mask_T)
            for chunk in reversed(run.chunks):
                # The last one is the first chunk, whose logits stay in memory.
                kept = training and chunk is run.chunks[0]
                loss_C, _ = run.losses_of(chunk, gradients=kept)
                torch.mul(loss_C, -run.mask_T[chunk], out=log_probs_T[chunk])
        if training:
            ctx.run, ctx.head, ctx.shape = run, head, whole.shape
            # ZeRO 3 frees the weight between the passes, and gathers the parameter again.
            run.weight_PH = run.bias_P = None  # type: ignore[assignment]
            ctx.save_for_backward(weight, bias)
            ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return log_probs_T.view(targets.mask_BS.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BP: Tensor) -> tuple[Tensor | None, ...]:
        run = ctx.run
        weight, bias = ctx.saved_tensors
        dtype = run.x_TH.dtype
        run.weight_PH = weight.to(dtype)
        run.bias_P = None if bias is None else bias.to(dtype)
        run.x_needs, run.weight_needs, run.bias_needs = ctx.needs_input_grad[:3]
        # The losses are the negative log-probabilities. Their weights are at most 1, which 16 bits
        # represent better than what a loss of many tokens gives to each.
        weight_T = grad_BP.flatten().to(run.work) * -run.mask_T
        largest = weight_T.abs().amax().clamp(min=torch.finfo(run.work).tiny)
        weight_T = weight_T / largest
        with torch.autocast(run.x_TH.device.type, enabled=False):
            run.allocate_gradients()
            for chunk in run.chunks:
                logits_CP = run.logits_CP
                if chunk is not run.chunks[0]:
                    _, logits_CP = run.losses_of(chunk, gradients=True)
                run.multiply(chunk, logits_CP, weight_T[chunk])
        x_grad, weight_grad, bias_grad = run.x_grad_TH, run.weight_grad_PH, run.bias_grad_P
        del ctx.run, run  # and with it the logits
        if x_grad is not None:
            x_grad = summed(x_grad.view(ctx.shape), ctx.head.tp)
        factor = factor_of(largest)
        grads = (
            None if grad is None else scaled(grad, factor, dtype)
            for grad, dtype in zip((x_grad, weight_grad, bias_grad), ctx.dtypes, strict=True)
        )
        return *grads, None, None, None
