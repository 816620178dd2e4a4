"""The GEMM with which activations enter tensor-parallel layers, and the interface of the kernels
that compute the GEMMs of linear layers.

With sequence parallelism, the input is gathered for the GEMM and again in the backward pass, so
that only a rank's slice is stored in between (Korthikanti et al. 2022, arXiv:2205.05198, section
4.2.2). Collectives of the backward pass overlap with GEMMs that do not depend on them.

Shapes: B batch, S sequence (outside tensor-parallel layers, a rank's slice of it if split), I
input, O output, T tokens (B x S). A width followed by P is one rank's share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.kernels.sums import add_later, key_of
from megatron.parallel.collectives import (
    Finish,
    after,
    finds_products,
    start_all_reduce,
    start_gather_sequence,
    start_scatter_sequence,
    start_sum_over_copies,
)
from megatron.parallel.later_products import (
    Gradients,
    GradientsOf,
    compute_now,
    leaves_products,
    now_or_later,
)
from megatron.parallel.mesh import SINGLE, Group
from megatron.parallel.tensor_parallel import TensorParallel, autocast_dtype


class LinearKernel:
    """GEMMs of linear layers. This base class computes them in the dtype of the input [B, S, I].
    Kernels of features multiply in another format than the dtype of the tensors.

    For each of its weights, a layer stores data that the kernel keeps from one step to the next
    (``kept``, initially None). A factor is an operand of a GEMM in the kernel's own format. Layers
    on several ranks call the methods for the steps of a GEMM separately.
    """

    def linear(self, x_BSI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, kept: Any) -> Tensor:
        """Return x A^T + b, [B, S, O], with this rank's weight. It is differentiable."""
        return F.linear(x_BSI, weight_OI, bias_O)

    def check_tokens(self, count: int) -> None:
        """Raise ValueError if weight gradients cannot be summed over ``count`` tokens."""

    def leaf(self, kept: Any) -> Tensor | None:
        """Return a tensor that receives :meth:`measured` as its gradient, or None if not needed."""
        return None

    def outputs(
        self,
        x_BSI: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        kept: Sequence[Any],
        save: bool,
    ) -> tuple[list[Tensor], tuple[Tensor | None, ...]]:
        """Return the outputs [B, S, OP] of projections of one input, and the tensors to save for
        the backward pass. With ``save``, these include everything that weight gradients need."""
        # F.linear rather than a plain GEMM, because DeepSpeed's profiler counts it.
        outputs = [
            F.linear(x_BSI, weight.to(x_BSI.dtype)) + bias
            if bias is not None and finds_products()  # fused products have no bias
            else F.linear(x_BSI, weight.to(x_BSI.dtype), bias)
            for weight, bias in zip(weights, biases, strict=True)
        ]
        return outputs, (x_BSI if save else None,)

    def gradients(
        self,
        grads_BSO: Sequence[Tensor],
        kept: Sequence[Any],
        of_input: bool,
        of_weights: Sequence[bool],
    ) -> list[Any]:
        """Return the outputs' gradients as factors for the input's and the weights' gradients."""
        return list(grads_BSO)

    def whole_input(self, x_BSI: Tensor | None, saved: Sequence[Any], kept: Sequence[Any]) -> Any:
        """Return the input, gathered again or as saved, as a factor for weight gradients."""
        return saved[0] if x_BSI is None else x_BSI

    def input_gradient_of(
        self,
        gradients: Sequence[Any],
        weights: Sequence[Tensor],
        kept: Sequence[Any],
        grads_BSO: Sequence[Tensor],
    ) -> Tensor:
        """Return this rank's contribution to the full input's gradient, [B, S, I]."""
        first, *rest = (g @ w.to(g.dtype) for g, w in zip(grads_BSO, weights, strict=True))
        for addend in rest:
            first += addend
        return first

    def weight_gradient(self, gradient: Any, x: Any, dtype: torch.dtype) -> Tensor:
        """Return a weight's gradient g^T x, [OP, I]."""
        product: Tensor = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
        return product

    def measured(self, gradient: Any, saved: Sequence[Any]) -> Tensor:
        """Return measurements, such as amax values, as the gradient of :meth:`leaf`."""
        raise AssertionError("nothing is measured")


PLAIN = LinearKernel()


class KernelStates:
    """State that layers or their kernels keep between optimizer steps. This base class has none.

    Attributes:
        file: prefix of the state's file names in checkpoints. None if the state is not saved.
    """

    file: str | None = None

    @property
    def members(self) -> Sequence[KernelStates]:
        """The states of the features that it combines, by default itself."""
        return (self,)

    def refresh(self) -> None:
        """Update data derived from the weights. Called before a forward pass after they changed."""

    def refresh_layer(self, layer: nn.Module) -> None:
        """Prepare a single layer before it runs, where weights are gathered layer by layer."""
        self.refresh()

    def invalidate(self) -> None:
        """Discard data derived from the weights. Called when they change other than by a step."""

    def forget_step(self) -> None:
        """Discard all measurements of backward passes since the last :meth:`end_step`."""

    def end_step(self) -> None:
        """Complete a step. Called on every rank after the last backward pass of the step."""

    def state(self) -> dict[str, Tensor]:
        """Return the values to save, by name. They are equal on all ranks that share layers."""
        return {}

    def load(self, state: Mapping[str, Tensor], folder: Path) -> str | None:
        """Load the state from a checkpoint of any layout. If ``state`` lacks values, change nothing
        and return a message about it."""


class SeveralStates(KernelStates):
    """Combined states of several features, of which at most one saves values in checkpoints."""

    def __init__(self, members: Sequence[KernelStates]) -> None:
        self._members = members
        self._stored = next((m for m in members if m.file is not None), KernelStates())
        self.file = self._stored.file

    @property
    def members(self) -> Sequence[KernelStates]:
        return self._members

    def refresh(self) -> None:
        for member in self._members:
            member.refresh()

    def refresh_layer(self, layer: nn.Module) -> None:
        for member in self._members:
            member.refresh_layer(layer)

    def invalidate(self) -> None:
        for member in self._members:
            member.invalidate()

    def forget_step(self) -> None:
        for member in self._members:
            member.forget_step()

    def end_step(self) -> None:
        for member in self._members:
            member.end_step()

    def state(self) -> dict[str, Tensor]:
        return self._stored.state()

    def load(self, state: Mapping[str, Tensor], folder: Path) -> str | None:
        return self._stored.load(state, folder)


class LinearMap(NamedTuple):
    """One rank's share of y = x A^T + b: ``weight`` [OP, I] and ``bias`` [OP]. Its gradient is
    summed over the ``copies`` neighbouring ranks that have the same share. ``kept`` is the data
    that ``kernel`` stores for the weight."""

    weight: Tensor
    bias: Tensor | None
    copies: int = 1
    kernel: LinearKernel | None = None
    kept: Any = None


def linear(
    x_BSI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    kernel: LinearKernel | None,
    kept: Any = None,
) -> Tensor:
    """Return x A^T + b, [B, S, O], with this rank's weight. Raises ValueError if the kernel cannot
    sum weight gradients over this number of tokens."""
    adds = torch.is_grad_enabled() and key_of(weight_OI) is not None
    if kernel is None and (adds or (leaves_products() and weight_OI.requires_grad)):
        return _column_linear(x_BSI, SINGLE, False, (LinearMap(weight_OI, bias_O),))[0]
    if kernel is None:
        return F.linear(x_BSI, weight_OI, bias_O)
    return kernel.linear(x_BSI, weight_OI, bias_O, kept)


def column_linear(
    x_BSI: Tensor, maps: Sequence[LinearMap], tp: TensorParallel
) -> tuple[Tensor, ...]:
    """Return the outputs [B, S, OP] of several projections of one input, with one kernel. The input
    is the same on every rank or, with sequence parallelism, this rank's slice [B, S/t, I]. Raises
    ValueError as :func:`linear` does."""
    if tp.group.size == 1:
        weights, biases, _, kernels, kept = zip(*maps, strict=True)
        return tuple(map(linear, repeat(x_BSI), weights, biases, kernels, kept))
    return _column_linear(x_BSI, tp.group, tp.split, maps)


def _column_linear(
    x_BSI: Tensor, group: Group, split: bool, maps: Sequence[LinearMap]
) -> tuple[Tensor, ...]:
    weights, biases, copies, kernels, kept = zip(*maps, strict=True)
    kernel = kernels[0] or PLAIN
    trained = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    if trained:
        kernel.check_tokens(x_BSI.shape[:-1].numel() * (group.size if split else 1))
    leaves = [kernel.leaf(each) for each in kept]
    # Gradients must be summed over copies before they are summed over micro batches.
    keys = tuple(
        key_of(weight) if trained and kernel is PLAIN and count == 1 else None
        for weight, count in zip(weights, copies, strict=True)
    )
    gradients, params = now_or_later(*weights, *biases)
    return _ColumnLinear.apply(
        x_BSI, group, split, copies, kernel, kept, keys, trained, gradients, *params, *leaves
    )


class _ColumnLinear(torch.autograd.Function):
    # Save parameters as they are, neither cast nor as views: ZeRO 3 frees their values after the
    # forward pass and restores them before the backward pass.

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: Group,
        sequence: bool,
        copies: tuple[int, ...],
        kernel: LinearKernel,
        kept: tuple[Any, ...],
        keys: tuple[Tensor | None, ...],
        trained: bool,
        gradients: GradientsOf,
        *params: Any,
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.sequence, ctx.copies, ctx.input_dtype = group, sequence, copies, x.dtype
        ctx.kernel, ctx.kept, ctx.keys, ctx.gradients = kernel, kept, keys, gradients
        count = len(copies)
        weights, biases = params[:count], params[count : 2 * count]
        x = mine = x.to(autocast_dtype(x))
        if sequence:
            x = start_gather_sequence(x, group)()
        biases = tuple(None if bias is None else bias.to(x.dtype) for bias in biases)
        # If the sequence is split, a rank saves only its own slice, which is smaller.
        outputs, saved = kernel.outputs(x, weights, biases, kept, trained and not sequence)
        ctx.saved = len(saved)
        ctx.save_for_backward(mine if sequence else None, *saved, *params)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads_BSO: Tensor) -> tuple[Tensor | None, ...]:
        mine, *tensors = ctx.saved_tensors
        saved, params = tensors[: ctx.saved], tensors[ctx.saved :]
        kernel, kept, group, count = ctx.kernel, ctx.kept, ctx.group, len(ctx.copies)
        keys = ctx.keys
        weights, biases = params[:count], params[count : 2 * count]
        x_needs, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[9:]
        gathers, every_copies = ctx.sequence and any(needs[:count]), ctx.copies
        finish_x: Finish | None = None
        if gathers and ctx.gradients is compute_now:
            finish_x = start_gather_sequence(after(mine, grads_BSO[0]), group)
        gradients = kernel.gradients(grads_BSO, kept, x_needs, needs[:count])
        finish_x_grad: Finish | None = None
        if x_needs:
            start = start_scatter_sequence if ctx.sequence else start_all_reduce
            addend = kernel.input_gradient_of(gradients, weights, kept, grads_BSO)
            finish_x_grad = start(addend, group) if group.size > 1 else lambda: addend

        def products() -> Gradients:  # must not refer to ctx, which would keep the graph alive
            x: Any = None
            if any(needs[:count]):
                finish = finish_x
                if finish is None and gathers:
                    finish = start_gather_sequence(mine, group)
                x = kernel.whole_input(None if finish is None else finish(), saved, kept)
            pending = []
            for place, (grad_BSO, copies) in enumerate(zip(grads_BSO, every_copies, strict=True)):
                weight_grad = bias_grad = None
                key = keys[place]
                if needs[place] and key is not None:
                    add_later(key, gradients[place].flatten(0, -2), x.flatten(0, -2))
                elif needs[place]:
                    weight_grad = kernel.weight_gradient(gradients[place], x, grad_BSO.dtype)
                    weight_grad = weight_grad.to(weights[place].dtype)
                if needs[count + place]:
                    bias_grad = grad_BSO.flatten(0, -2).sum(0).to(biases[place].dtype)
                pending.append(_start_sums((weight_grad, bias_grad), copies, group))
            weight_grads, bias_grads = zip(*(finish() for finish in pending), strict=True)
            return *weight_grads, *bias_grads

        of_params = ctx.gradients(products)
        leaves = [
            kernel.measured(gradient, saved) if needed else None
            for gradient, needed in zip(gradients, needs[2 * count :], strict=True)
        ]
        x_grad = None if finish_x_grad is None else finish_x_grad().to(ctx.input_dtype)
        return x_grad, *[None] * 8, *of_params, *leaves


def _start_sums(
    grads: tuple[Tensor | None, Tensor | None], copies: int, group: Group
) -> Callable[[], tuple[Tensor | None, Tensor | None]]:
    present = [grad for grad in grads if grad is not None]
    if copies == 1 or not present:
        return lambda: grads
    flat = torch.cat([grad.flatten() for grad in present])
    finish_flat = start_sum_over_copies(flat, copies, group)

    def finish() -> tuple[Tensor | None, Tensor | None]:
        totals = finish_flat().split([grad.numel() for grad in present])
        for grad, total in zip(present, totals, strict=True):
            grad.copy_(total.view_as(grad))
        return grads

    return finish
