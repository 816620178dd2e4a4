"""Rows of tokens sorted by expert, and the matrix products of experts.

A token has a row for each expert that it chose. Rows are put in order once; outputs and gradients
go back by the place of each choice, so that the order of every sum is fixed.

On a GPU all experts of a layer are multiplied by one kernel, with offsets that stay on the device.
On a CPU they are a loop of GEMMs that write into one tensor, which takes less time than torch's
kernel there, and than a batch of GEMMs with padding.

Shapes: T tokens, E experts (in weights those of this rank), K choices of a token, R rows, N rows of
one expert, I inputs, O outputs, H hidden, F inner width, G outputs of the first matrix (F, or twice
F with a gate), X any width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.features.experts.low_rank import LowRankExperts
from megatron.parallel.shard import Cut, Init, Shard, parameter, shard_of
from megatron.parallel.tensor_parallel import TensorParallel, autocast_dtype

Sizes = Sequence[int] | Tensor
"""Rows of each expert, in order; a tensor may be on a GPU, and is not read by the host there."""
Activation = Callable[[Tensor], Tensor]

_CHUNK = 2**18, 2**26
"""Elements of the rows that are multiplied at a time, on a CPU and on a GPU."""
_ALIGNED = 16
"""Bytes that divide a row of each matrix of the grouped kernel."""


class RowOrder(NamedTuple):
    """The rows of tokens, sorted by expert, and within an expert by token.

    Attributes:
        rows_R: the token of each row. On a GPU choices that are dropped have rows too, the last;
            they are not computed.
        place_TK: the row of each choice; R where it is dropped.
        counts_E: rows of each expert, int64.
        sizes: the same on the host; None on a GPU.
    """

    rows_R: Tensor
    place_TK: Tensor
    counts_E: Tensor
    sizes: list[int] | None


def order(experts_TK: Tensor, experts: int) -> RowOrder:
    """The order of the rows of choices, which are at most ``experts``, for one that is dropped."""
    choices = experts_TK.shape[-1]
    sorted_R, choice_R = torch.sort(experts_TK.flatten(), stable=True)
    edges = torch.arange(experts + 1, device=experts_TK.device)
    counts_E = torch.searchsorted(sorted_R, edges).diff()
    sizes = counts_E.tolist() if experts_TK.device.type == "cpu" else None
    if sizes is not None:
        choice_R = choice_R[: sum(sizes)]
    rows = len(choice_R)
    place_TK = torch.full_like(experts_TK, rows)
    place_TK.view(-1)[choice_R] = torch.arange(rows, device=experts_TK.device)
    if sizes is None:
        place_TK.masked_fill_(experts_TK == experts, rows)
    return RowOrder(choice_R // choices, place_TK, counts_E, sizes)


def dispatch(x_TX: Tensor, rows: RowOrder) -> Tensor:
    """The rows of tokens, [R, X]."""
    return _Dispatch.apply(x_TX, rows)


def combine(y_RX: Tensor, weights_TK: Tensor, rows: RowOrder) -> Tensor:
    """The sum over a token's choices of weight x row, [T, X], in the dtype of the rows and computed
    in float32 or better. The rows may be those of :class:`RowOrder` without the dropped ones."""
    return _Combine.apply(y_RX, weights_TK, rows)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TX: Tensor, rows: RowOrder) -> Tensor:
        ctx.save_for_backward(rows.place_TK)
        return x_TX.index_select(0, rows.rows_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RX: Tensor) -> tuple[Tensor, None]:
        (place_TK,) = ctx.saved_tensors
        return _sum_of_rows(grad_RX, place_TK), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RX: Tensor, weights_TK: Tensor, rows: RowOrder) -> Tensor:
        ctx.save_for_backward(y_RX, weights_TK, rows.rows_R, rows.place_TK)
        return _sum_of_rows(y_RX, rows.place_TK, weights_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TX: Tensor) -> tuple[Tensor, Tensor, None]:
        y_RX, weights_TK, rows_R, place_TK = ctx.saved_tensors
        grad_RX = grad_TX.index_select(0, rows_R[: len(y_RX)])
        weights_grad = _by_choice(_dots(grad_RX, y_RX), place_TK).to(weights_TK.dtype)
        grad_RX *= _by_row(weights_TK, place_TK, len(y_RX))[:, None]
        return grad_RX, weights_grad, None


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _dots(a_RX: Tensor, b_RX: Tensor) -> Tensor:
    """The product of each row with the other, in float32 or better, [R]."""
    kind = _exact(a_RX.dtype)
    rows = max(1, _CHUNK[a_RX.is_cuda] // a_RX.shape[1])
    pairs = zip(a_RX.split(rows), b_RX.split(rows), strict=True)
    return torch.cat([torch.linalg.vecdot(a.to(kind), b.to(kind)) for a, b in pairs])


def _by_row(values_TK: Tensor, place_TK: Tensor, rows: int) -> Tensor:
    """Values of choices, [R]; zero for rows without one."""
    values_R = values_TK.new_zeros(rows + 1)  # dropped choices are put at the end
    place = place_TK.clamp(max=rows).flatten()
    return values_R.scatter_(0, place, values_TK.flatten())[:rows]


def _by_choice(values_R: Tensor, place_TK: Tensor) -> Tensor:
    """Values of rows, [T, K]; zero for dropped choices."""
    return F.pad(values_R, (0, 1)).take(place_TK.clamp(max=len(values_R)))


def _sum_of_rows(y_RX: Tensor, place_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    """The weighted sum of each token's rows, [T, X], choice by choice; dropped ones are left out,
    whatever their weight."""
    rows, kind = len(y_RX), _exact(y_RX.dtype)
    there_TK = place_TK < rows
    if y_RX.device.type == "cpu":
        counts_T = there_TK.sum(1)
        return F.embedding_bag(
            place_TK[there_TK],
            y_RX.to(kind),
            counts_T.cumsum(0) - counts_T,
            mode="sum",
            per_sample_weights=None if weights_TK is None else weights_TK[there_TK].to(kind),
        ).to(y_RX.dtype)
    sum_TX = y_RX.new_zeros(len(place_TK), y_RX.shape[1], dtype=kind)
    for choice, (place_T, there_T) in enumerate(zip(place_TK.T, there_TK.T, strict=True)):
        # Rows that are not computed may be NaN.
        row_TX = y_RX.index_select(0, place_T.clamp(max=rows - 1))
        row_TX = row_TX.masked_fill_(~there_T[:, None], 0)
        sum_TX += row_TX if weights_TK is None else row_TX * weights_TK[:, choice, None].to(kind)
    return sum_TX.to(y_RX.dtype)


class ExpertLinear(nn.Module):
    """y = x A^T + b with a matrix for each expert, all in one parameter.

    Args:
        experts: number of all experts.
        outputs: widths of fused outputs, each cut by itself; O is their sum.
        cut_over: the axis or axes of the mesh over which the experts are divided.
        cut_outputs, cut_inputs: whether tensor-parallel ranks have a part of each expert. Where
            inputs are cut, outputs are addends: the first rank adds the bias, and all have its
            gradient.
        shared: is called with the parameters before they are used, for example to sum gradients of
            ranks that have the same experts.
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
    ) -> None:
        super().__init__()
        assert not (cut_outputs and cut_inputs)
        self.tp, coordinates, width = tp, tp.coordinates, sum(outputs)
        if init.xavier:  # of each matrix; torch takes a third dimension for that of a convolution
            init = Init(bound=(6 / (inputs + width)) ** 0.5)
        by_expert = Cut(0, cut_over)
        of_outputs = (Cut(1, parts=tuple(outputs)),) if cut_outputs else ()
        cuts = (by_expert, *of_outputs, *((Cut(2),) if cut_inputs else ()))
        self.weight = parameter(Shard((experts, width, inputs), cuts), init, coordinates)
        self.bias: nn.Parameter | None = None
        if bias:
            shard = Shard((experts, width), (by_expert, *of_outputs))
            self.bias = parameter(shard, Init(), coordinates)
        self.adds_bias = not cut_inputs or coordinates.get("tensor", (0, 1))[0] == 0
        self.shared = shared
        self.additions: LowRankExperts | None = None

    def add_low_rank(self, rank: int, scale: float, dropout: float) -> None:
        """Give the matrix of each expert a low-rank addition."""
        multiply = partial(_multiplied, bias=None, adds_bias=False)
        self.additions = LowRankExperts(
            self, shard_of(self.weight), self.tp, rank, scale, dropout, multiply
        )

    def forward(self, x: Tensor, sizes: Sizes, use: Callable[..., Tensor] | None = None) -> Tensor:
        """Rows [R, I], sorted by the experts of this rank, to [R, O]; or the result of ``use`` for
        the input, the weight and the bias. All go through ``forward`` because ZeRO 3 gathers the
        parameters around module calls."""
        names = [name for name, _ in self.named_parameters(recurse=False)]
        params: Sequence[Tensor] = list(self.parameters(recurse=False))
        if self.shared is not None:
            params = self.shared(*params)
        by_name = dict(zip(names, params, strict=True))
        weight, bias = by_name["weight"], by_name.get("bias")
        if use is not None:
            assert self.additions is None
            return use(x, weight, bias)
        y = _multiplied(x, weight, sizes, bias, self.adds_bias)
        if self.additions is None:
            return y
        of_low_rank = by_name["lora_a"], by_name["lora_b"]
        return self.additions.added(y, x, sizes, *of_low_rank, self.training)


def _multiplied(
    x_RI: Tensor, weight_EOI: Tensor, sizes: Sizes, bias: Tensor | None, adds_bias: bool
) -> Tensor:
    return _ExpertLinear.apply(x_RI, weight_EOI, bias, sizes, adds_bias)


class _ExpertLinear(torch.autograd.Function):
    # Parameters are saved as they came, not cast: ZeRO 3 frees their values after the forward pass
    # and has them back before the backward pass.

    @staticmethod
    def forward(
        ctx: Any,
        x_RI: Tensor,
        weight_EOI: Tensor,
        bias_EO: Tensor | None,
        sizes: Sizes,
        adds_bias: bool,
    ) -> Tensor:
        ctx.sizes, ctx.input_dtype = sizes, x_RI.dtype
        x_RI = x_RI.to(autocast_dtype(x_RI)).contiguous()
        ctx.save_for_backward(x_RI, weight_EOI, bias_EO)
        return _outputs(x_RI, weight_EOI, bias_EO if adds_bias else None, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, ...]:
        x_RI, weight_EOI, bias_EO = ctx.saved_tensors
        grad_RO, sizes, needs = grad_RO.contiguous(), ctx.sizes, ctx.needs_input_grad
        x_grad = None
        if needs[0]:
            x_grad = _input_gradient(grad_RO, weight_EOI, sizes).to(ctx.input_dtype)
        weight_grad = _weight_gradient(grad_RO, x_RI, weight_EOI, sizes) if needs[1] else None
        bias_grad = _bias_gradient(grad_RO, bias_EO, sizes) if needs[2] else None
        return x_grad, weight_grad, bias_grad, None, None


def expert_mlp(
    x_TH: Tensor,
    weights_TK: Tensor,
    rows: RowOrder,
    up: ExpertLinear,
    down: ExpertLinear,
    activation: Activation,
) -> Tensor:
    """The weighted sum of the outputs of each token's experts, [T, H], where this rank has all
    experts: that of :func:`dispatch`, ``up``, ``activation``, ``down`` and :func:`combine`, of
    which it keeps the input of the activation alone for the backward pass."""
    sizes = rows.counts_E if rows.sizes is None else rows.sizes
    if not torch.is_grad_enabled() or up.additions or down.additions:
        h_RG = up(dispatch(x_TH, rows), sizes)
        return combine(down(activation(h_RG), sizes), weights_TK, rows)

    def with_up(x_TH: Tensor, *of_up: Tensor | None) -> Tensor:
        def with_down(x_TH: Tensor, *of_down: Tensor | None) -> Tensor:
            how = rows, sizes, activation, down.adds_bias
            return _ExpertMLP.apply(x_TH, weights_TK, *of_up, *of_down, how)

        return down(x_TH, sizes, with_down)

    return up(x_TH, sizes, with_up)


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        weights_TK: Tensor,
        up_EGH: Tensor,
        up_bias_EG: Tensor | None,
        down_EHF: Tensor,
        down_bias_EH: Tensor | None,
        how: tuple[RowOrder, Sizes, Activation, bool],
    ) -> Tensor:
        rows, *ctx.how = how
        sizes, activation, adds_bias = ctx.how
        ctx.input_dtype = x_TH.dtype
        x_TH = x_TH.to(autocast_dtype(x_TH))
        h_RG = _outputs(x_TH.index_select(0, rows.rows_R), up_EGH, up_bias_EG, sizes)
        added = down_bias_EH if adds_bias else None
        y_RH = _outputs(activation(h_RG), down_EHF, added, sizes)
        params = up_EGH, up_bias_EG, down_EHF, down_bias_EH
        ctx.save_for_backward(x_TH, weights_TK, rows.rows_R, rows.place_TK, h_RG, *params)
        return _sum_of_rows(y_RH, rows.place_TK, weights_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, weights_TK, rows_R, place_TK, h_RG, *params = ctx.saved_tensors
        up_EGH, up_bias_EG, down_EHF, down_bias_EH = params
        sizes, activation, adds_bias = ctx.how
        x_needs, weights_need, *needs = ctx.needs_input_grad[:6]
        x_grad = weights_grad = None
        weights_R1 = _by_row(weights_TK, place_TK, len(rows_R))[:, None]
        grad_RH = grad_TH.index_select(0, rows_R)
        h_RG = h_RG.detach().requires_grad_()
        with torch.enable_grad():
            a_RF = activation(h_RG)
        # Without the weight, whose gradient it gives: g . (D a) = (D^T g) . a
        a_grad_RF = _input_gradient(grad_RH, down_EHF, sizes)
        if weights_need:
            dots_R = _dots(a_grad_RF, a_RF.detach())
            if down_bias_EH is not None and adds_bias:
                dots_TE = grad_TH @ down_bias_EH.to(grad_TH.dtype).T
                dots_R += dots_TE[rows_R, _expert_of_row(sizes, rows_R)]
            weights_grad = _by_choice(dots_R, place_TK).to(weights_TK.dtype)
        (h_grad_RG,) = torch.autograd.grad(a_RF, h_RG, a_grad_RF.mul_(weights_R1))
        down_grad = down_bias_grad = up_grad = up_bias_grad = None
        if needs[2]:
            weighted_RF = (a_RF.detach() * weights_R1).to(a_RF.dtype)
            down_grad = _weight_gradient(grad_RH, weighted_RF, down_EHF, sizes)
        if needs[3]:
            down_bias_grad = _bias_gradient(grad_RH.mul_(weights_R1), down_bias_EH, sizes)
        if needs[0]:
            up_grad = _weight_gradient(h_grad_RG, x_TH.index_select(0, rows_R), up_EGH, sizes)
        if needs[1]:
            up_bias_grad = _bias_gradient(h_grad_RG, up_bias_EG, sizes)
        if x_needs:
            x_grad_RH = _input_gradient(h_grad_RG, up_EGH, sizes)
            x_grad = _sum_of_rows(x_grad_RH, place_TK).to(ctx.input_dtype)
        return x_grad, weights_grad, up_grad, up_bias_grad, down_grad, down_bias_grad, None


def _outputs(
    x_RI: Tensor,
    weight_EOI: Tensor,
    bias_EO: Tensor | None,
    sizes: Sizes,
) -> Tensor:
    """x A^T + b of each expert, [R, O]."""
    if bias_EO is not None:
        bias_EO = bias_EO.to(x_RI.dtype)
    if _has_kernel(x_RI, weight_EOI):
        weight_EIO = weight_EOI.to(x_RI.dtype).transpose(1, 2)
        y_RO = F.grouped_mm(x_RI, weight_EIO, offs=_ends(sizes, x_RI))
        return y_RO if bias_EO is None else y_RO.add_(bias_EO[_expert_of_row(sizes, x_RI)])
    y_RO = x_RI.new_empty(len(x_RI), weight_EOI.shape[1])
    for expert, at in _ranges(sizes):
        x_NI, weight_OI, y_NO = x_RI[at], weight_EOI[expert].to(x_RI.dtype), y_RO[at]
        bias_O = None if bias_EO is None else bias_EO[expert]
        if bias_O is None:
            torch.mm(x_NI, weight_OI.t(), out=y_NO)
        else:
            torch.addmm(bias_O, x_NI, weight_OI.t(), out=y_NO)
    return y_RO


def _input_gradient(grad_RO: Tensor, weight_EOI: Tensor, sizes: Sizes) -> Tensor:
    """g A of each expert, [R, I]."""
    if _has_kernel(grad_RO, weight_EOI):
        return F.grouped_mm(grad_RO, weight_EOI.to(grad_RO.dtype), offs=_ends(sizes, grad_RO))
    x_grad_RI = grad_RO.new_empty(len(grad_RO), weight_EOI.shape[2])
    for expert, at in _ranges(sizes):
        torch.mm(grad_RO[at], weight_EOI[expert].to(grad_RO.dtype), out=x_grad_RI[at])
    return x_grad_RI


def _weight_gradient(grad_RO: Tensor, x_RI: Tensor, weight_EOI: Tensor, sizes: Sizes) -> Tensor:
    """g^T x of each expert, like the weight; zeros for one without rows."""
    if _has_kernel(x_RI, weight_EOI):
        grad_EOI = F.grouped_mm(grad_RO.t(), x_RI, offs=_ends(sizes, x_RI))
        return grad_EOI.to(weight_EOI.dtype)
    grad_EOI = torch.empty_like(weight_EOI)
    for expert, at in _ranges(sizes):
        if grad_EOI.dtype == x_RI.dtype:
            torch.mm(grad_RO[at].t(), x_RI[at], out=grad_EOI[expert])
        else:
            grad_EOI[expert] = grad_RO[at].t() @ x_RI[at]
    return grad_EOI


def _bias_gradient(grad_RO: Tensor, bias_EO: Tensor, sizes: Sizes) -> Tensor:
    """The sum of each expert's rows, like the bias."""
    width = _ALIGNED // grad_RO.element_size()
    if _has_kernel(grad_RO, bias_EO):  # as a product, which needs no host and has one order
        ones_RN = grad_RO.new_ones(len(grad_RO), width)
        sums_EON = F.grouped_mm(grad_RO.t(), ones_RN, offs=_ends(sizes, grad_RO))
        return sums_EON[..., 0].to(bias_EO.dtype)
    grad_EO = torch.empty_like(bias_EO)
    for expert, at in _ranges(sizes):
        grad_EO[expert] = grad_RO[at].sum(0)
    return grad_EO


def _has_kernel(x_RX: Tensor, param: Tensor) -> bool:
    """True where torch's grouped kernel multiplies them: bfloat16 on GPUs, with rows of multiples
    of 16 bytes. On a CPU it takes longer than the loop."""
    aligned = all(width * x_RX.element_size() % _ALIGNED == 0 for width in param.shape[1:])
    return x_RX.is_cuda and x_RX.dtype == torch.bfloat16 and aligned


def _ends(sizes: Sizes, like: Tensor) -> Tensor:
    """The end of each expert's rows, as the grouped kernel reads it."""
    counts_E = torch.as_tensor(sizes).to(like.device, non_blocking=True)
    return counts_E.cumsum(0, dtype=torch.int32)


def _expert_of_row(sizes: Sizes, like: Tensor) -> Tensor:
    """The expert of each row, [R]; the last one for rows that are not computed."""
    rows_R = torch.arange(len(like), device=like.device, dtype=torch.int32)
    expert_R = torch.searchsorted(_ends(sizes, like), rows_R, right=True)
    return expert_R.clamp_(max=len(sizes) - 1)


def padded_places(sizes: Sequence[int], padded: Callable[[int], int]) -> tuple[Tensor, list[int]]:
    """The places of rows among those of experts that have ``padded(n)`` for n rows, int64 [R] on
    the CPU, and the numbers of those; an expert without rows has none."""
    larger = [padded(size) if size else 0 for size in sizes]
    begins = [end - size for size, end in zip(larger, accumulate(larger), strict=True)]
    ranges = [torch.arange(b, b + size) for b, size in zip(begins, sizes, strict=True)]
    return torch.cat(ranges), larger


def _ranges(sizes: Sizes) -> Iterator[tuple[int, slice]]:
    """Experts and their rows."""
    counts = sizes.tolist() if isinstance(sizes, Tensor) else sizes
    for expert, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True)):
        yield expert, slice(end - count, end)
