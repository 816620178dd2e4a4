"""Causal depthwise convolution followed by SiLU.

Shapes: B samples, S tokens of this rank, P pieces of sequences, T tokens of a piece (see
:mod:`megatron.features.recurrent.passing`), K kernel width in tokens, C channels of this rank; E =
K - 1 + T tokens of a piece and of its predecessors in the kernel, R rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.features.recurrent.passing import Pieces
from megatron.parallel.shard import Cut, Init, Shard, parameter
from megatron.parallel.tensor_parallel import TensorParallel

_CHUNK = 1 << 16
"""Number of elements in a chunk of rows. In float32 these 256 KiB fit into a core's cache."""


class CausalConvolution(nn.Module):
    """Causal depthwise convolution with SiLU: y_t = silu(bias + sum over j < K of weight_j x_(t - K
    + 1 + j)) in each channel, where x of another document or before the sequence is zero.

    ``channels`` are the widths of the fused inputs, each of which is sharded separately over
    tensor-parallel ranks. The weight is [C, K], with the last column for the current token. Weight
    and bias are initialised as in torch.nn.Conv1d.
    """

    def __init__(
        self, channels: Sequence[int], width: int, *, bias: bool, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.width, total, init = width, sum(channels), Init(bound=width**-0.5)
        cut = (Cut(0, parts=tuple(channels)),)
        self.weight = parameter(Shard((total, width), cut), init, tp.coordinates)
        self.bias = parameter(Shard((total,), cut), init, tp.coordinates) if bias else None

    def forward(self, x_PTC: Tensor, pieces: Pieces, before_PKC: Tensor | None = None) -> Tensor:
        """Convolve [P, T, C] into the same shape and dtype. ``before_PKC`` are the K - 1 inputs
        before each piece, as from :meth:`tail` in generation; None gets them from other pieces."""
        if before_PKC is None:
            before_PKC = pieces.before(x_PTC, self.width - 1)
        x_PEC = torch.cat([before_PKC.to(x_PTC.dtype), x_PTC], 1)
        connected = [pieces.connected(distance) for distance in range(self.width - 1, 0, -1)]
        seen = [mask[..., None] for mask in connected if mask is not None]
        if torch.compiler.is_compiling() or x_PTC.shape[1] == 1:
            return F.silu(_convolved(x_PEC, *self.taps(), seen)).to(x_PTC.dtype)
        return _Convolution.apply(x_PEC, *self.taps(), *seen)

    def taps(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight and bias of this rank's channels."""
        return self.weight, self.bias

    def tail(self, x_BSC: Tensor, before_BKC: Tensor | None) -> Tensor:
        """Return the last K - 1 inputs of sequences after new tokens ``x_BSC``, [B, K - 1, C].
        ``before_BKC`` are the inputs before them; None means zeros, at the start of a sequence."""
        kept = self.width - 1
        if before_BKC is None:
            return F.pad(x_BSC, (0, 0, max(0, kept - x_BSC.shape[1]), 0))[:, -kept:]
        return torch.cat([before_BKC.to(x_BSC.dtype), x_BSC], 1)[:, -kept:]


def _convolved(
    x: Tensor, weight_CK: Tensor, bias_C: Tensor | None, seen: Sequence[Tensor]
) -> Tensor:
    """Return the convolution before SiLU, [..., R, C], of K - 1 + R rows of inputs, at least in
    float32. ``seen`` has a mask, bool [..., R, 1], for each of the K - 1 earlier inputs, if any."""
    kind = torch.promote_types(x.dtype, torch.float32)
    x, weight_CK = x.to(kind), weight_CK.to(kind)
    last, rows = weight_CK.shape[1] - 1, x.shape[-2] - weight_CK.shape[1] + 1
    y = x.narrow(-2, last, rows) * weight_CK[:, last]
    if bias_C is not None:
        y = y + bias_C.to(kind)
    for j in range(last):
        tap = x.narrow(-2, j, rows)
        y = torch.addcmul(y, tap * seen[j] if seen else tap, weight_CK[:, j])
    return y


class _Convolution(torch.autograd.Function):
    """Convolution and SiLU chunk by chunk, which save only the inputs for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x_PEC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, *seen: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x_PEC, weight_CK, bias_C, *seen)
        pieces, length, channels = x_PEC.shape
        y_PTC = x_PEC.new_empty(pieces, length - weight_CK.shape[1] + 1, channels)
        for piece, first, end, inputs in _chunks(x_PEC, weight_CK):
            masks = [mask[piece, first:end] for mask in seen]
            y_PTC[piece, first:end] = F.silu(_convolved(inputs, weight_CK, bias_C, masks))
        return y_PTC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PTC: Tensor) -> tuple[Tensor | None, ...]:
        x_PEC, weight_CK, bias_C, *seen = ctx.saved_tensors
        kind = torch.promote_types(x_PEC.dtype, torch.float32)
        taps_KC = weight_CK.to(kind).T.contiguous()
        x_grad, taps_grad = torch.zeros_like(x_PEC, dtype=kind), torch.zeros_like(taps_KC)
        bias_grad = None if bias_C is None else torch.zeros_like(taps_KC[0])
        last = len(taps_KC) - 1
        for piece, first, end, inputs in _chunks(x_PEC, weight_CK):
            masks = [mask[piece, first:end] for mask in seen]
            y_RC = _convolved(inputs, weight_CK, bias_C, masks)
            grad_RC = torch.ops.aten.silu_backward(grad_PTC[piece, first:end].to(kind), y_RC)
            if bias_grad is not None:
                bias_grad += grad_RC.sum(0)
            inputs = inputs.to(kind)
            for j in range(last + 1):
                part_RC = grad_RC * masks[j] if masks and j < last else grad_RC
                taps_grad[j] += (part_RC * inputs[j : j + end - first]).sum(0)
                x_grad[piece, first + j : end + j].addcmul_(part_RC, taps_KC[j])
        of_bias = None if bias_grad is None or bias_C is None else bias_grad.to(bias_C.dtype)
        of_weight = taps_grad.T.to(weight_CK.dtype)
        return x_grad.to(x_PEC.dtype), of_weight, of_bias, *(None for _ in seen)


def _chunks(x_PEC: Tensor, weight_CK: Tensor) -> Any:
    """Yield (piece, first row, end, inputs of these rows and the K - 1 rows before them)."""
    pieces, length, channels = x_PEC.shape
    before = weight_CK.shape[1] - 1
    rows, step = length - before, max(1, _CHUNK // channels)
    for piece, first in product(range(pieces), range(0, rows, step)):
        end = min(first + step, rows)
        yield piece, first, end, x_PEC[piece, first : end + before]
