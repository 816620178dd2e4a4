"""Tensor-parallel layers, and the GEMM by which activations enter them.

With sequence parallelism the input is gathered for the GEMM and again in the backward pass, so that
only a rank's slice of it is kept in between (Korthikanti et al. 2022, arXiv:2205.05198, section
4.2.2). Collectives of the backward pass overlap with GEMMs that do not wait for them.

Shapes: B batch, S sequence (outside the cut layers a rank's slice of it if the region is split), I
input, O output, V vocabulary, H hidden, T tokens (B x S); a width followed by P is one rank's share
of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.features.float8.casts import Cast, Operand
from megatron.features.float8.linear import (
    NOTHING_KEPT,
    Float8,
    Kept,
)
from megatron.parallel.mesh import Group
from megatron.parallel.shard import Cut, Init, Shard, parameter
from megatron.parallel.tensor_parallel import (
    Finish,
    TensorParallel,
    autocast_dtype,
    start_all_reduce,
    start_gather_sequence,
    start_scatter_sequence,
    start_sum_over_copies,
)


class LayerAdapters(Protocol):
    """What is added to the outputs of a layer; its parameters are the layer's own."""

    def outputs(
        self, layer: ParallelLinear, x_BSI: Tensor, maps: Sequence[LinearMap]
    ) -> tuple[Tensor, ...]:
        """The outputs of :func:`column_linear`, or, of a layer that is cut along its inputs, those
        of all ranks together (:meth:`TensorParallel.leave`)."""
        ...


class ParallelLinear(nn.Module):
    """A linear layer that is cut over the ranks of ``tp``. Widths are those of the whole layer;
    ``init`` draws the weights, and biases start at zero."""

    matrices: ClassVar[tuple[str, ...]] = ()
    """Names of the matrices that are fused in the weight, in their order, where there are
    several."""
    adapters: LayerAdapters | None = None
    float8: Float8 | None = None
    weight_kept: Kept = NOTHING_KEPT
    """For :attr:`weight`; a layer with a second weight has a second attribute named after it."""

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp

    def _parameters_of(
        self, outputs: int, inputs: int, cut: Cut, bias: bool, init: Init, part: bool = False
    ) -> tuple[nn.Parameter, nn.Parameter | None]:
        names = ("weight", "bias") if part else (None, None)
        weight = Shard((outputs, inputs), (cut,), whole=names[0])
        of_bias = Shard((outputs,), () if cut.dim else (cut,), whole=names[1])
        return (
            parameter(weight, init, self.tp.coordinates),
            parameter(of_bias, Init(), self.tp.coordinates) if bias else None,
        )


class ColumnParallelLinear(ParallelLinear):
    """y = x A^T + b with the output features cut over ranks; ``outputs`` are the widths of fused
    outputs, each cut by itself, and O is their sum."""

    def __init__(
        self, inputs: int, outputs: Sequence[int], *, bias: bool, init: Init, tp: TensorParallel
    ) -> None:
        super().__init__(tp)
        cut = Cut(0, parts=tuple(outputs))
        self.weight, self.bias = self._parameters_of(sum(outputs), inputs, cut, bias, init)

    def forward(self, x_BSI: Tensor) -> Tensor:
        """[B, S, I] to this rank's features of the whole sequence, [B, S, OP]."""
        whole = LinearMap(self.weight, self.bias, 1, self.float8, self.weight_kept)
        if self.adapters is not None:
            (y_BSO,) = self.adapters.outputs(self, x_BSI, (whole,))
        else:
            (y_BSO,) = column_linear(x_BSI, (whole,), self.tp)
        return y_BSO


class QKVParallelLinear(ParallelLinear):
    """Queries, keys and values by one GEMM, heads cut over ranks. With fewer key and value heads
    than ranks each is on several neighbouring ranks; its weights are then parameters of their own,
    ``kv_weight`` and ``kv_bias``, with the same canonical names as the queries'. The number of
    ranks divides ``heads``, and divides ``kv_heads`` or is divisible by it."""

    matrices = ("q", "k", "v")
    kv_weight_kept: Kept = NOTHING_KEPT

    def __init__(
        self,
        inputs: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        bias: bool,
        init: Init,
        tp: TensorParallel,
    ) -> None:
        super().__init__(tp)
        self.copies = max(1, tp.group.size // kv_heads)
        self.kv_width = max(1, kv_heads // tp.group.size) * head_dim
        parts = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        fused, rows = self.copies == 1, sum(parts)
        cut = Cut(0, parts=parts, held=None if fused else (0,))
        self.weight, self.bias = self._parameters_of(rows, inputs, cut, bias, init, part=True)
        self.kv_weight: nn.Parameter | None = None
        self.kv_bias: nn.Parameter | None = None
        if not fused:
            cut = Cut(0, parts=parts, held=(1, 2), copies=self.copies)
            self.kv_weight, self.kv_bias = self._parameters_of(
                rows, inputs, cut, bias, init, part=True
            )

    def forward(self, x_BSI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S, I] to this rank's queries, keys and values of the whole sequence, each with its
        heads side by side in the last dimension."""
        maps = [LinearMap(self.weight, self.bias, 1, self.float8, self.weight_kept)]
        if self.kv_weight is not None:
            both = self.kv_weight, self.kv_bias
            maps.append(LinearMap(*both, self.copies, self.float8, self.kv_weight_kept))
        if self.adapters is not None:
            outputs = self.adapters.outputs(self, x_BSI, maps)
        else:
            outputs = column_linear(x_BSI, maps, self.tp)
        if len(outputs) == 2:
            q, kv = outputs
            k, v = kv.chunk(2, dim=-1)
        else:
            q_width = outputs[0].shape[-1] - 2 * self.kv_width
            q, k, v = outputs[0].split([q_width, self.kv_width, self.kv_width], dim=-1)
        return q, k, v


class KVParallelLinear(ParallelLinear):
    """Keys and values by one GEMM, ``heads`` cut over ranks; with fewer heads than ranks each is
    held by several neighbouring ranks."""

    matrices = ("k", "v")

    def __init__(
        self,
        inputs: int,
        heads: int,
        head_dim: int,
        *,
        bias: bool,
        init: Init,
        tp: TensorParallel,
    ) -> None:
        super().__init__(tp)
        self.copies = max(1, tp.group.size // heads)
        rows = heads * head_dim
        cut = Cut(0, parts=(rows, rows), copies=self.copies)
        self.weight, self.bias = self._parameters_of(2 * rows, inputs, cut, bias, init)

    def forward(self, x_BTI: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, I] to this rank's keys and values of the whole sequence, each with its heads side
        by side in the last dimension."""
        both = LinearMap(self.weight, self.bias, self.copies, self.float8, self.weight_kept)
        if self.adapters is not None:
            (kv,) = self.adapters.outputs(self, x_BTI, (both,))
        else:
            (kv,) = column_linear(x_BTI, (both,), self.tp)
        k, v = kv.chunk(2, dim=-1)
        return k, v


class RowParallelLinear(ParallelLinear):
    """y = x A^T + b with the input features cut over ranks; the bias is added after the sum over
    ranks."""

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool, init: Init, tp: TensorParallel
    ) -> None:
        super().__init__(tp)
        self.weight, self.bias = self._parameters_of(outputs, inputs, Cut(1), bias, init)

    def forward(self, x_BSI: Tensor) -> Tensor:
        """This rank's features of the whole sequence [B, S, IP] to [B, S, O]."""
        if self.adapters is not None:
            (y_BSO,) = self.adapters.outputs(self, x_BSI, (LinearMap(self.weight, self.bias),))
            return y_BSO
        if self.tp.group.size == 1:
            return linear(x_BSI, self.weight, self.bias, self.float8, self.weight_kept)
        y_BSO = self.tp.leave(linear(x_BSI, self.weight, None, self.float8, self.weight_kept))
        return y_BSO if self.bias is None else y_BSO + self.tp.shared(self.bias)[0]


class WholeLinear(nn.Module):
    """y = x A^T + b outside the cut layers, which every rank has whole. ``tp`` says whether a rank
    applies it to its slice of the sequence; biases start at zero."""

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool, init: Init, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.tp = tp
        self.weight = parameter(Shard((outputs, inputs)), init, tp.coordinates)
        self.bias = parameter(Shard((outputs,)), Init(), tp.coordinates) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        return F.linear(x, *self.tp.shared(*self.parameters()))


class Dropout(nn.Module):
    """Dropout outside the cut layers; ranks with the same activations draw the same mask."""

    def __init__(self, probability: float, tp: TensorParallel) -> None:
        super().__init__()
        self.probability, self.tp = probability, tp

    def forward(self, x_BSH: Tensor) -> Tensor:
        """[B, S, H] to [B, S, H]."""
        if not self.training or not self.probability:
            return x_BSH
        with self.tp.random():
            return F.dropout(x_BSH, self.probability)


class LinearMap(NamedTuple):
    """One rank's share of y = x A^T + b: ``weight`` [OP, I], ``bias`` [OP]. The gradient is summed
    over the ``copies`` neighbouring ranks that have this same share. ``kept`` is what ``float8``
    keeps for the weight."""

    weight: Tensor
    bias: Tensor | None
    copies: int = 1
    float8: Float8 | None = None
    kept: Kept = NOTHING_KEPT


def linear(
    x_BSI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    float8: Float8 | None,
    kept: Kept = NOTHING_KEPT,
) -> Tensor:
    """x A^T + b on one rank, [B, S, O]. Raises ValueError if weights are trained in 8 bits and the
    number of tokens is not a multiple of 16, or of 128 with scales by block."""
    if float8 is None:
        return F.linear(x_BSI, weight_OI, bias_O)
    return float8.linear(x_BSI, weight_OI, bias_O, kept)


def column_linear(
    x_BSI: Tensor, maps: Sequence[LinearMap], tp: TensorParallel
) -> tuple[Tensor, ...]:
    """Outputs of several maps of one input, each [B, S, OP], all in 8 bits or none. The input is
    the same on every rank; in a split region it is this rank's [B, S/t, I]. Raises ValueError as
    :func:`linear` does."""
    weights, biases, copies, float8s, kept = zip(*maps, strict=True)
    if tp.group.size == 1:
        return tuple(map(linear, repeat(x_BSI), weights, biases, float8s, kept))
    float8 = float8s[0]
    trained = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    if float8 is not None and trained:
        float8.check_tokens(x_BSI.shape[:-1].numel() * tp.slices)
    largest = [each.largest for each in kept]
    return _ColumnLinear.apply(
        x_BSI, tp.group, tp.split, copies, float8, kept, trained, *weights, *biases, *largest
    )


class _ColumnLinear(torch.autograd.Function):
    # Parameters are saved as they came, not cast and not as views: ZeRO 3 frees their values after
    # the forward pass and has them back before the backward pass.

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: Group,
        sequence: bool,
        copies: tuple[int, ...],
        float8: Float8 | None,
        kept: tuple[Kept, ...],
        trained: bool,
        *params: Any,
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.sequence, ctx.copies, ctx.input_dtype = group, sequence, copies, x.dtype
        ctx.float8, ctx.kept = float8, kept
        count = len(copies)
        weights, biases = params[:count], params[count : 2 * count]
        x = mine = x.to(autocast_dtype(x))
        if sequence:
            x = start_gather_sequence(x, group)()
        biases = tuple(None if bias is None else bias.to(x.dtype) for bias in biases)
        if float8 is None:
            ctx.save_for_backward(mine, None, None, None, *params)
            # F.linear, not a plain GEMM: DeepSpeed's profiler counts it.
            return tuple(
                F.linear(x, weight.to(x.dtype), bias)
                for weight, bias in zip(weights, biases, strict=True)
            )
        # Of a split sequence a rank keeps its own part, which is smaller from two ranks on.
        whole = trained and not sequence
        cast = float8.cast_input(x.flatten(0, 1), kept[0].input_largest, columns=whole)
        columns = cast.columns or (None, None)
        ctx.save_for_backward(mine if sequence else None, cast.largest, *columns, *params)
        outputs = []
        for weight, bias, each in zip(weights, biases, kept, strict=True):
            y_TO = float8.output(cast, float8.weight_rows(weight, each), x.dtype)
            outputs.append((y_TO if bias is None else y_TO + bias).unflatten(0, x.shape[:2]))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads_BSO: Tensor) -> tuple[Tensor | None, ...]:
        mine, x_largest, x_values, x_scale, *params = ctx.saved_tensors
        float8, kept, count = ctx.float8, ctx.kept, len(ctx.copies)
        weights, biases = params[:count], params[count : 2 * count]
        x_needs, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[7:]
        finish_x: Finish = lambda: mine  # noqa: E731
        if ctx.sequence and any(needs[:count]):
            finish_x = start_gather_sequence(mine, ctx.group)
        casts: list[Cast] = []
        if float8 is not None:
            casts = [
                float8.cast_gradient(
                    grad_BSO.flatten(0, 1), each.gradient_largest, rows=x_needs, columns=needed
                )
                for grad_BSO, each, needed in zip(grads_BSO, kept, needs[:count], strict=True)
            ]
        finish_x_grad: Finish | None = None
        if x_needs:
            start = start_scatter_sequence if ctx.sequence else start_all_reduce
            addend = _input_gradient(grads_BSO, casts, weights, float8, kept)
            finish_x_grad = start(addend, ctx.group)
        x: Any = Cast(columns=Operand(x_values, x_scale))
        if mine is not None and any(needs[:count]):
            x = finish_x().flatten(0, 1)
            if float8 is not None:
                x = float8.cast_input(x, kept[0].input_largest, rows=False)
        pending = []
        for place, (grad_BSO, copies) in enumerate(zip(grads_BSO, ctx.copies, strict=True)):
            grad_TO = grad_BSO.flatten(0, 1)
            weight_grad = bias_grad = None
            if needs[place]:
                if float8 is None:
                    weight_grad = grad_TO.t() @ x
                else:
                    weight_grad = float8.weight_gradient(casts[place], x, grad_TO.dtype)
                weight_grad = weight_grad.to(weights[place].dtype)
            if needs[count + place]:
                bias_grad = grad_TO.sum(0).to(biases[place].dtype)
            pending.append(_start_sums((weight_grad, bias_grad), copies, ctx.group))
        weight_grads, bias_grads = zip(*(finish() for finish in pending), strict=True)
        found: list[Tensor | None] = [None] * count
        for place, needed in enumerate(needs[2 * count :]):
            if needed:
                found[place] = torch.stack([x_largest, casts[place].known_largest])
        x_grad = None if finish_x_grad is None else finish_x_grad().to(ctx.input_dtype)
        return x_grad, *[None] * 6, *weight_grads, *bias_grads, *found


def _input_gradient(
    grads_BSO: Sequence[Tensor],
    casts: Sequence[Cast],
    weights: Sequence[Tensor],
    float8: Float8 | None,
    kept: Sequence[Kept],
) -> Tensor:
    """This rank's addend of the gradient of the whole input [B, S, I]."""
    if float8 is None:
        products = (grad @ w.to(grad.dtype) for grad, w in zip(grads_BSO, weights, strict=True))
    else:
        products = (
            float8.input_gradient(
                cast, float8.weight_columns(weight, each), grad_BSO.dtype
            ).unflatten(0, grad_BSO.shape[:2])
            for cast, weight, each, grad_BSO in zip(casts, weights, kept, grads_BSO, strict=True)
        )
    first, *rest = products
    for addend in rest:
        first += addend
    return first


def _start_sums(
    grads: tuple[Tensor | None, Tensor | None], copies: int, group: Group
) -> Callable[[], tuple[Tensor | None, Tensor | None]]:
    found = [grad for grad in grads if grad is not None]
    if copies == 1 or not found:
        return lambda: grads
    flat = torch.cat([grad.flatten() for grad in found])
    finish_flat = start_sum_over_copies(flat, copies, group)

    def finish() -> tuple[Tensor | None, Tensor | None]:
        totals = finish_flat().split([grad.numel() for grad in found])
        for grad, total in zip(found, totals, strict=True):
            grad.copy_(total.view_as(grad))
        return grads

    return finish
