"""Linear layers of experts: one matrix per expert, all in one parameter.

On a GPU one grouped kernel multiplies all experts of a layer, with offsets that stay on the device.
On a CPU a loop of GEMMs writes into one tensor, which is faster than torch's grouped kernel and
than a batched GEMM with padding.

Shapes: E experts (in weights the experts of this rank), R rows, N rows of one expert, I inputs, O
outputs, r rank of low-rank additions, X any width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.parallel.later_products import Gradients, GradientsOf, now_or_later
from megatron.parallel.shard import Cut, Init, Shard, parameter, shard_of
from megatron.parallel.tensor_parallel import TensorParallel, autocast_dtype, sum_gradients

Sizes = Sequence[int] | Tensor
"""Number of rows of each expert, in order. A tensor on a GPU is not copied to host memory."""

_ALIGNED = 16
"""Alignment of matrix rows that the grouped kernel requires, in bytes."""


class ExpertLinear(nn.Module):
    """Linear layer y = x A^T + b with a matrix per expert, all in one parameter.

    Args:
        experts: total number of experts.
        outputs: widths of fused outputs, each of which is sharded separately; O is their sum.
        cut_over: axis or axes of the mesh over which the experts are distributed.
        cut_outputs, cut_inputs: True if the outputs or inputs of an expert are sharded across
            tensor-parallel ranks. With sharded inputs, results are partial sums: only the first
            rank adds the bias, but every rank computes its gradient.
        shared: function applied to the parameters before use, for example to sum the gradients of
            ranks that have the same experts.
        summed: True if ``shared`` sums gradients.
        share: fraction of the experts that process a token.
    """

    def __init__(
        self,
        experts: int,
        outputs: Sequence[int],
        inputs: int,
        *,
        bias: bool,
        init: Init,
        tp: TensorParallel,
        cut_over: str | tuple[str, ...] = "expert",
        cut_outputs: bool = False,
        cut_inputs: bool = False,
        shared: Callable[..., tuple[Tensor, ...]] | None = None,
        summed: bool = False,
        share: float = 1.0,
    ) -> None:
        super().__init__()
        assert not (cut_outputs and cut_inputs)
        self.tp, coordinates, width = tp, tp.coordinates, sum(outputs)
        # Xavier bound of one expert's matrix: torch would treat a 3D weight as a convolution's.
        if init.xavier:
            init = Init(bound=(6 / (inputs + width)) ** 0.5)
        cuts = (Cut(0, cut_over), *((Cut(1, parts=tuple(outputs)),) if cut_outputs else ()))
        shard = Shard((experts, width, inputs), (*cuts, *((Cut(2),) if cut_inputs else ())))
        self.weight = parameter(shard, init, coordinates, summed)
        self.bias: nn.Parameter | None = None
        if bias:
            of_bias = Shard((experts, width), cuts)
            self.bias = parameter(of_bias, Init(), coordinates, summed)
        self.adds_bias = not cut_inputs or coordinates.get("tensor", (0, 1))[0] == 0
        self.shared, self.share = shared, share
        self.changes_input = False  # True if a feature modifies the input rows
        self.low_rank: tuple[float, float] | None = None  # scale and dropout of a low-rank addition

    @property
    def alone(self) -> bool:
        """True if the layer cannot be fused with the rest of the MLP into one autograd function."""
        return self.low_rank is not None or self.changes_input

    def add_low_rank(self, rank: int, scale: float, dropout: float) -> None:
        """Add a low-rank adapter to each expert's matrix (Hu et al. 2021, arXiv:2106.09685,
        equation 3): y = x W^T + s (x A^T) B^T with ``lora_a`` [E, r, I] and ``lora_b`` [E, O,
        r], sharded like the weight. Initially, A is uniform in [-1/sqrt(I), 1/sqrt(I)] and B is
        zero."""
        whole = shard_of(self.weight)
        experts, outputs, inputs = whole.full_shape
        for name, shape, dim, init in (
            ("lora_a", (experts, rank, inputs), 2, Init(bound=inputs**-0.5)),
            ("lora_b", (experts, outputs, rank), 1, Init()),
        ):
            cuts = tuple(cut for cut in whole.cuts if cut.dim in (0, dim))
            shard = replace(whole, full_shape=shape, cuts=cuts)
            self.register_parameter(name, parameter(shard, init, self.tp.coordinates))
        self.low_rank = scale, dropout

    def forward(self, x: Tensor, sizes: Sizes, use: Callable[..., Tensor] | None = None) -> Tensor:
        """Map rows [R, I], sorted by this rank's experts, to [R, O]. If ``use`` is given, return
        ``use(x, weight, bias)`` instead. ZeRO 3 gathers parameters around module calls, so all uses
        of them must go through ``forward``."""
        params: dict[str, Tensor] = dict(self.named_parameters(recurse=False))
        if self.shared is not None:
            params = dict(zip(params, self.shared(*params.values()), strict=True))
        weight, bias = params["weight"], params.get("bias")
        if use is not None:
            assert self.low_rank is None
            return use(x, weight, bias)
        y = _multiplied(x, weight, sizes, bias, self.adds_bias)
        if self.low_rank is None:
            return y
        (scale, dropout), (a, b) = self.low_rank, (params["lora_a"], params["lora_b"])
        # The replicated factor is applied to a shard of the inner width on each rank, so its
        # gradients must be summed.
        cut = {cut.dim for cut in shard_of(self.weight).cuts}
        if 1 in cut:
            (a,) = sum_gradients(self.tp.group, a)
        elif 2 in cut:
            (b,) = sum_gradients(self.tp.group, b)
        z = _multiplied(F.dropout(x, dropout, self.training), a, sizes)
        return y + scale * _multiplied(z, b, sizes)


def _multiplied(
    x_RI: Tensor,
    weight_EOI: Tensor,
    sizes: Sizes,
    bias_EO: Tensor | None = None,
    adds_bias: bool = False,
) -> Tensor:
    gradients, params = now_or_later(weight_EOI, bias_EO)
    return _ExpertLinear.apply(x_RI, *params, sizes, adds_bias, gradients)


class _ExpertLinear(torch.autograd.Function):
    # Save the parameters themselves rather than converted copies: ZeRO 3 frees their values after
    # the forward pass and gathers them again before the backward pass.

    @staticmethod
    def forward(
        ctx: Any,
        x_RI: Tensor,
        weight_EOI: Tensor,
        bias_EO: Tensor | None,
        sizes: Sizes,
        adds_bias: bool,
        gradients: GradientsOf,
    ) -> Tensor:
        ctx.sizes, ctx.input_dtype, ctx.gradients = sizes, x_RI.dtype, gradients
        x_RI = x_RI.to(autocast_dtype(x_RI)).contiguous()
        ctx.save_for_backward(x_RI, weight_EOI, bias_EO)
        return expert_outputs(x_RI, weight_EOI, bias_EO if adds_bias else None, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, ...]:
        x_RI, weight_EOI, bias_EO = ctx.saved_tensors
        grad_RO, sizes, needs = grad_RO.contiguous(), ctx.sizes, ctx.needs_input_grad
        x_grad = None
        if needs[0]:
            x_grad = input_gradient(grad_RO, weight_EOI, sizes).to(ctx.input_dtype)

        def products() -> Gradients:
            weight_grad = weight_gradient(grad_RO, x_RI, weight_EOI, sizes) if needs[1] else None
            return weight_grad, bias_gradient(grad_RO, bias_EO, sizes) if needs[2] else None

        return x_grad, *ctx.gradients(products), None, None, None


def expert_outputs(
    x_RI: Tensor,
    weight_EOI: Tensor,
    bias_EO: Tensor | None,
    sizes: Sizes,
) -> Tensor:
    """Compute x A^T + b of each expert, [R, O]."""
    if bias_EO is not None:
        bias_EO = bias_EO.to(x_RI.dtype)
    if _has_kernel(x_RI, weight_EOI):
        weight_EIO = weight_EOI.to(x_RI.dtype).transpose(1, 2)
        y_RO = F.grouped_mm(x_RI, weight_EIO, offs=_ends(sizes, x_RI))
        return y_RO if bias_EO is None else y_RO.add_(bias_EO[expert_of_row(sizes, x_RI)])
    rows, x_RI = len(x_RI), _with_spare_rows(x_RI)
    y_RO = x_RI.new_empty(len(x_RI), weight_EOI.shape[1])
    for expert, at in _ranges(sizes, _multiple(x_RI)):
        x_NI, weight_OI, y_NO = x_RI[at], weight_EOI[expert].to(x_RI.dtype), y_RO[at]
        bias_O = None if bias_EO is None else bias_EO[expert]
        if bias_O is None:
            torch.mm(x_NI, weight_OI.t(), out=y_NO)
        else:
            torch.addmm(bias_O, x_NI, weight_OI.t(), out=y_NO)
    return y_RO[:rows]


def input_gradient(grad_RO: Tensor, weight_EOI: Tensor, sizes: Sizes) -> Tensor:
    """Compute the input gradient g A of each expert, [R, I]."""
    if _has_kernel(grad_RO, weight_EOI):
        return F.grouped_mm(grad_RO, weight_EOI.to(grad_RO.dtype), offs=_ends(sizes, grad_RO))
    rows, grad_RO = len(grad_RO), _with_spare_rows(grad_RO)
    x_grad_RI = grad_RO.new_empty(len(grad_RO), weight_EOI.shape[2])
    for expert, at in _ranges(sizes, _multiple(grad_RO)):
        torch.mm(grad_RO[at], weight_EOI[expert].to(grad_RO.dtype), out=x_grad_RI[at])
    return x_grad_RI[:rows]


def weight_gradient(grad_RO: Tensor, x_RI: Tensor, weight_EOI: Tensor, sizes: Sizes) -> Tensor:
    """Compute the weight gradient g^T x of each expert; zeros for experts without rows."""
    if _has_kernel(x_RI, weight_EOI):
        grad_EOI = F.grouped_mm(grad_RO.t(), x_RI, offs=_ends(sizes, x_RI))
        return grad_EOI.to(weight_EOI.dtype)
    grad_EOI, multiple = torch.empty_like(weight_EOI), _multiple(x_RI)
    for expert, at in _ranges(sizes):
        grad_NO, x_NI = grad_RO[at], x_RI[at]
        if multiple > 1:
            grad_NO, x_NI = (F.pad(x, (0, 0, 0, -len(x) % multiple)) for x in (grad_NO, x_NI))
        if grad_EOI.dtype == x_RI.dtype:
            torch.mm(grad_NO.t(), x_NI, out=grad_EOI[expert])
        else:
            grad_EOI[expert] = grad_NO.t() @ x_NI
    return grad_EOI


def bias_gradient(grad_RO: Tensor, bias_EO: Tensor, sizes: Sizes) -> Tensor:
    """Compute the sum of each expert's rows, in the shape and dtype of the bias."""
    width = _ALIGNED // grad_RO.element_size()
    if _has_kernel(grad_RO, bias_EO):  # a GEMM does not synchronize, and is deterministic
        ones_RN = grad_RO.new_ones(len(grad_RO), width)
        sums_EON = F.grouped_mm(grad_RO.t(), ones_RN, offs=_ends(sizes, grad_RO))
        return sums_EON[..., 0].to(bias_EO.dtype)
    grad_EO = torch.empty_like(bias_EO)
    for expert, at in _ranges(sizes):
        grad_EO[expert] = grad_RO[at].sum(0)
    return grad_EO


def _has_kernel(x_RX: Tensor, param: Tensor) -> bool:
    """Return whether torch's grouped kernel is used: for bfloat16 on GPUs, if the size of a matrix
    row is a multiple of 16 bytes. On a CPU the kernel is slower than the loop."""
    aligned = all(width * x_RX.element_size() % _ALIGNED == 0 for width in param.shape[1:])
    return x_RX.is_cuda and x_RX.dtype == torch.bfloat16 and aligned


def _ends(sizes: Sizes, like: Tensor) -> Tensor:
    """Return the end offset of each expert's rows, int32 [E], as the grouped kernel expects."""
    counts_E = torch.as_tensor(sizes).to(like.device, non_blocking=True)
    return counts_E.cumsum(0, dtype=torch.int32)


def expert_of_row(sizes: Sizes, like: Tensor) -> Tensor:
    """Return each row's expert index, [R]. Rows that are not computed get the last expert."""
    rows_R = torch.arange(len(like), device=like.device, dtype=torch.int32)
    expert_R = torch.searchsorted(_ends(sizes, like), rows_R, right=True)
    return expert_R.clamp_(max=len(sizes) - 1)


def _multiple(x_RX: Tensor) -> int:
    """Return the multiple to which the row count of matrix products is padded. For 16-bit dtypes on
    a CPU, oneDNN compiles a kernel for every shape, which takes as long as 20 products, and an
    expert's row count changes in every step."""
    return 32 if x_RX.device.type == "cpu" and x_RX.dtype in (torch.bfloat16, torch.float16) else 1


def _with_spare_rows(x_RX: Tensor) -> Tensor:
    spare = _multiple(x_RX) - 1
    return F.pad(x_RX, (0, 0, 0, spare)) if spare else x_RX


def _ranges(sizes: Sizes, multiple: int = 1) -> Iterator[tuple[int, slice]]:
    """Yield each expert with the range of its rows. With a ``multiple``, ranges extend into the
    next experts' rows, which those experts overwrite afterwards."""
    counts = sizes.tolist() if isinstance(sizes, Tensor) else sizes
    for expert, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True)):
        yield expert, slice(end - count, end + -count % multiple)
