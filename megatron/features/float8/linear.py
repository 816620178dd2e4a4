"""GEMMs of linear layers in 8-bit floating point.

The recipe determines which amax sets a scale: that of a matrix (``tensorwise``), of each row and
column in a product (``rowwise``), of 1 x 128 activations and 128 x 128 weights (``blockwise``), or
of a matrix in earlier steps (``delayed``; weights use their current values, which are known). Casts
are in :mod:`megatron.features.float8.casts`.

Shapes: T tokens, I input width, O output width; M, K, N as in a GEMM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.config.flags import ConfigError
from megatron.features.float8.casts import BLOCK, Cast, Operand, Scaling, cast, columns_of
from megatron.parallel.later_products import Gradients, GradientsOf, now_or_later
from megatron.parallel.linear import LinearKernel
from megatron.parallel.tensor_parallel import autocast_dtype

MULTIPLE = 16
"""Alignment of 8-bit GEMMs on GPUs, also required on CPUs. It must divide a layer's input and
output widths and its number of tokens."""

FIRST_CAPABILITY = (8, 9)
"""Lowest CUDA compute capability with 8-bit floating-point GEMMs (Ada)."""

FORWARD = torch.float8_e4m3fn
"""Dtype of inputs and weights."""


class Kept(NamedTuple):
    """FP8 state of a layer's weight that persists between steps.

    Attributes:
        weight: rows of the weight in 8 bits; None to cast it at every use. Backward passes
            transpose them or, with one scale per row, cast the columns again. Keeping both layouts
            would take two bytes of memory per weight.
        largest: amax of the input and of the output gradient that set the scales (recipe
            ``delayed``), float32 [2]. The backward pass returns the current micro batch's amax
            values as the gradient of this tensor.
        measured: True once ``largest`` has been measured. Until then current values are used.
    """

    weight: Operand | None = None
    largest: Tensor | None = None
    measured: bool = False

    @property
    def input_largest(self) -> Tensor | None:
        """Amax that sets the scale of the input; None to use the current one."""
        return self.largest[0] if self.measured and self.largest is not None else None

    @property
    def gradient_largest(self) -> Tensor | None:
        """Amax that sets the scale of the output gradient; None to use the current one."""
        return self.largest[1] if self.measured and self.largest is not None else None


NOTHING_KEPT = Kept()


@dataclass(frozen=True)
class Float8(LinearKernel):
    """Kernel that computes the linear layers of a block in 8 bits. With ``hybrid``, gradients are
    E5M2; inputs and weights are always E4M3. For ``recipe`` see the module docstring."""

    hybrid: bool = True
    recipe: str = "tensorwise"

    @property
    def multiple(self) -> int:
        """Number that must divide a layer's input and output widths and its number of tokens."""
        return BLOCK if self.recipe == "blockwise" else MULTIPLE

    def linear(
        self,
        x_BSI: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        kept: Kept | None = None,
    ) -> Tensor:
        """Return x W^T + b, [B, S, O], differentiably. Raises ConfigError if the weight is trained
        and the number of tokens is not a multiple of 16, or of 128 with ``blockwise``."""
        kept = kept or NOTHING_KEPT
        trained = weight_OI.requires_grad and torch.is_grad_enabled()
        if trained:
            self.check_tokens(x_BSI.shape[:-1].numel())
        # The autograd function computes [T, O], of which a view is returned: a function's own
        # result
        # might be overwritten in place.
        gradients, params = now_or_later(weight_OI, bias_O)
        y_TO = _Float8Linear.apply(
            x_BSI.flatten(0, -2), *params, kept.largest, self, trained, kept.measured, gradients,
            *(kept.weight or ()),
        )  # fmt: skip
        return y_TO.unflatten(0, x_BSI.shape[:-1])

    def check_tokens(self, count: int) -> None:
        """Raise ConfigError if no 8-bit GEMM sums weight gradients over ``count`` tokens."""
        if count % self.multiple:
            raise ConfigError(
                f"--fp8-format: the {count} tokens of a micro batch are not a multiple of "
                f"{self.multiple}; choose --micro-batch-size x --seq-length, and every length of a "
                "curriculum, so that they are, or leave --fp8-format out"
            )

    def weight_rows(self, weight_OI: Tensor, kept: Kept) -> Operand:
        """Return a weight's rows in 8 bits, for the forward pass: the kept ones if they exist."""
        return kept.weight or _present(self._cast_weight(weight_OI, rows=True).rows)

    def weight_columns(self, weight_OI: Tensor, kept: Kept) -> Operand:
        """Return a weight's columns in 8 bits, for input gradients."""
        if kept.weight is None or self._weight_scaling == "row":
            return _present(self._cast_weight(weight_OI, columns=True).columns)
        return columns_of(kept.weight, self._weight_scaling, weight_OI)

    def _cast_weight(self, weight_OI: Tensor, *, rows: bool = False, columns: bool = False) -> Cast:
        with _without_autocast(weight_OI):
            scaling = self._weight_scaling
            return cast(weight_OI.detach(), FORWARD, scaling, rows=rows, columns=columns)

    def cast_input(
        self, x_TI: Tensor, earlier: Tensor | None, *, rows: bool = True, columns: bool = True
    ) -> Cast:
        """Cast a layer's input: ``rows`` for the output, ``columns`` for the weight gradient."""
        with _without_autocast(x_TI):
            return cast(x_TI, FORWARD, self._scaling, rows=rows, columns=columns, earlier=earlier)

    @property
    def backward(self) -> torch.dtype:
        """Dtype of output gradients."""
        return torch.float8_e5m2 if self.hybrid else FORWARD

    def cast_gradient(
        self,
        grad_TO: Tensor,
        earlier: Tensor | None,
        *,
        rows: bool = True,
        columns: bool = True,
        largest: Tensor | None = None,
    ) -> Cast:
        """Cast a layer's output gradient: ``rows`` for the input gradient, ``columns`` for the
        weight gradient. For ``largest`` see :func:`cast`."""
        with _without_autocast(grad_TO):
            return cast(
                grad_TO, self.backward, self._scaling, rows=rows, columns=columns, largest=largest,
                earlier=earlier,
            )  # fmt: skip

    @property
    def _scaling(self) -> Scaling:
        kinds: dict[str, Scaling] = {"rowwise": "row", "blockwise": "block"}
        return kinds.get(self.recipe, "tensor")

    @property
    def _weight_scaling(self) -> Scaling:
        return "square" if self.recipe == "blockwise" else self._scaling

    def output(self, x: Cast, weight: Operand, dtype: torch.dtype) -> Tensor:
        """Return x W^T, [T, O]."""
        # Outputs tolerate faster accumulation in lower precision; gradients do not.
        return self._multiply(x.rows, weight, dtype, squares=True, fast=True)

    def input_gradient(self, grad: Cast, weight: Operand, dtype: torch.dtype) -> Tensor:
        """Return g W, [T, I]."""
        return self._multiply(grad.rows, weight, dtype, squares=True)

    def weight_gradient(self, grad: Cast, x: Cast, dtype: torch.dtype) -> Tensor:
        """Return g^T x, [O, I]."""
        return self._multiply(grad.columns, x.columns, dtype)

    # Steps of a layer that is sharded over tensor-parallel ranks.

    def leaf(self, kept: Kept | None) -> Tensor | None:
        return None if kept is None else kept.largest

    def outputs(
        self,
        x_BSI: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        kept: Sequence[Kept | None],
        save: bool,
    ) -> tuple[list[Tensor], tuple[Tensor | None, ...]]:
        first = kept[0] or NOTHING_KEPT
        x = self.cast_input(x_BSI.flatten(0, 1), first.input_largest, columns=save)
        outputs = []
        for weight, bias, each in zip(weights, biases, kept, strict=True):
            rows = self.weight_rows(weight, each or NOTHING_KEPT)
            y_TO = self.output(x, rows, x_BSI.dtype)
            outputs.append((y_TO if bias is None else y_TO + bias).unflatten(0, x_BSI.shape[:2]))
        return outputs, (x.largest, *(x.columns or (None, None)))

    def gradients(
        self,
        grads_BSO: Sequence[Tensor],
        kept: Sequence[Kept | None],
        of_input: bool,
        of_weights: Sequence[bool],
    ) -> list[Cast]:
        return [
            self.cast_gradient(
                grad_BSO.flatten(0, 1),
                (each or NOTHING_KEPT).gradient_largest,
                rows=of_input,
                columns=needed,
            )
            for grad_BSO, each, needed in zip(grads_BSO, kept, of_weights, strict=True)
        ]

    def whole_input(
        self, x_BSI: Tensor | None, saved: Sequence[Tensor | None], kept: Sequence[Kept | None]
    ) -> Cast:
        if x_BSI is not None:
            largest = (kept[0] or NOTHING_KEPT).input_largest
            return self.cast_input(x_BSI.flatten(0, 1), largest, rows=False)
        _, values, scale = saved
        assert values is not None and scale is not None
        return Cast(columns=Operand(values, scale))

    def input_gradient_of(
        self,
        gradients: Sequence[Cast],
        weights: Sequence[Tensor],
        kept: Sequence[Kept | None],
        grads_BSO: Sequence[Tensor],
    ) -> Tensor:
        first, *rest = (
            self.input_gradient(
                gradient, self.weight_columns(weight, each or NOTHING_KEPT), grad_BSO.dtype
            ).unflatten(0, grad_BSO.shape[:2])
            for gradient, weight, each, grad_BSO in zip(
                gradients, weights, kept, grads_BSO, strict=True
            )
        )
        for addend in rest:
            first += addend
        return first

    def measured(self, gradient: Cast, saved: Sequence[Tensor | None]) -> Tensor:
        largest = saved[0]
        assert largest is not None
        return torch.stack([largest, gradient.known_largest])

    def _multiply(
        self,
        left: Operand | None,
        right: Operand | None,
        dtype: torch.dtype,
        squares: bool = False,
        fast: bool = False,
    ) -> Tensor:
        left, right = _present(left), _present(right)
        with _without_autocast(left.values):
            if self.recipe == "blockwise":
                product = _multiply_blocks(left, right, squares)
            else:
                product = self._multiply_scaled(left, right, dtype, fast)
        # In code compiled by torch 2.11, a function loses its gradients if its result passes
        # through a
        # cast that changes nothing.
        return product if product.dtype == dtype else product.to(dtype)

    def _multiply_scaled(
        self, left: Operand, right: Operand, dtype: torch.dtype, fast: bool
    ) -> Tensor:
        # GPUs support row scales only for bfloat16 results. A CPU would round those several times.
        result = torch.bfloat16 if self.recipe == "rowwise" else dtype
        return torch._scaled_mm(
            left.values,
            right.values.t(),
            scale_a=left.scale,
            scale_b=right.scale.t() if right.scale.dim() else right.scale,
            out_dtype=torch.float32 if left.values.device.type == "cpu" else result,
            use_fast_accum=fast,
        )


def _multiply_blocks(left: Operand, right: Operand, squares: bool) -> Tensor:
    """Multiply a left factor with block scales by a right one with block or square scales. Fast
    accumulation is not available for these."""
    # GPUs round the result to bfloat16; a CPU would round it several times.
    dtype = torch.float32 if left.values.device.type == "cpu" else torch.bfloat16
    return torch.ops.megatron.multiply_blocks(*left, *right, squares, dtype)


def _multiply_blocks_on_gpu(
    left: Tensor,
    left_scale: Tensor,
    right: Tensor,
    right_scale: Tensor,
    squares: bool,
    dtype: torch.dtype,
) -> Tensor:
    kinds = F.ScalingType
    return F.scaled_mm(
        left,
        right.t(),
        left_scale,
        kinds.BlockWise1x128,
        right_scale.t() if squares else right_scale,
        kinds.BlockWise128x128 if squares else kinds.BlockWise1x128,
        output_dtype=dtype,
    )


def _multiply_blocks_on_cpu(
    left: Tensor,
    left_scale: Tensor,
    right: Tensor,
    right_scale: Tensor,
    squares: bool,
    dtype: torch.dtype,
) -> Tensor:
    left = _restored(Operand(left, left_scale), 1)
    return (left @ _restored(Operand(right, right_scale), BLOCK if squares else 1).t()).to(dtype)


# An operator that compilers treat as opaque: Dynamo of torch 2.11 cannot trace F.scaled_mm, and
# Inductor of 2.13 replaces it by torch._scaled_mm, which expects scales of different shapes.
# torch.library.custom_op would import sympy at the start of every run.
_LIBRARY = torch.library.Library("megatron", "FRAGMENT")
_LIBRARY.define(
    "multiply_blocks(Tensor left, Tensor left_scale, Tensor right, Tensor right_scale, "
    "bool squares, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
_LIBRARY.impl("multiply_blocks", _multiply_blocks_on_cpu, "CPU")
_LIBRARY.impl("multiply_blocks", _multiply_blocks_on_gpu, "CUDA")
_LIBRARY.impl("multiply_blocks", _multiply_blocks_on_gpu, "Meta")  # torch checks the scales' shapes


def _restored(operand: Operand, rows: int) -> Tensor:
    """Return the values in float32. Each scale applies to a block of ``rows`` x 128 values."""
    values, scale = operand
    scale = scale[:, : values.shape[1] // BLOCK].repeat_interleave(BLOCK, 1)
    return values.float() * scale.repeat_interleave(rows, 0)


def _present(operand: Operand | None) -> Operand:
    assert operand is not None
    return operand


def _without_autocast(x: Tensor) -> torch.autocast:
    # On a CPU, autocast would change the dtype of products.
    return torch.autocast(x.device.type, enabled=False)


class _Float8Linear(torch.autograd.Function):
    # The weight is saved as passed in, not cast; see _ColumnLinear in parallel/linear.py.

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        largest: Tensor | None,
        float8: Float8,
        trained: bool,
        measured: bool,
        gradients: GradientsOf,
        *operands: Tensor,
    ) -> Tensor:
        kept = _kept(largest, measured, operands)
        ctx.float8, ctx.measured = float8, measured
        ctx.gradients = gradients
        ctx.input_dtype, ctx.weight_dtype = x_TI.dtype, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        x_TI = x_TI.to(autocast_dtype(x_TI))
        x = float8.cast_input(x_TI, kept.input_largest, columns=trained)
        columns = x.columns or (None, None)
        ctx.save_for_backward(weight, *columns, x.largest, largest, *operands)
        y_TO = float8.output(x, float8.weight_rows(weight, kept), x_TI.dtype)
        return y_TO if bias is None else y_TO + bias.to(y_TO.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        weight, x_values, x_scale, x_largest, largest, *operands = ctx.saved_tensors
        float8, kept = ctx.float8, _kept(largest, ctx.measured, operands)
        x_needs, weight_needs, bias_needs, largest_needs, *_ = ctx.needs_input_grad
        x_grad = maxima = None
        grad = float8.cast_gradient(
            grad_TO, kept.gradient_largest, rows=x_needs, columns=weight_needs
        )
        if x_needs:
            columns = float8.weight_columns(weight, kept)
            x_grad = float8.input_gradient(grad, columns, grad_TO.dtype).to(ctx.input_dtype)
        weight_dtype, bias_dtype = ctx.weight_dtype, ctx.bias_dtype

        def products() -> Gradients:
            weight_grad = bias_grad = None
            if weight_needs:
                x = Cast(columns=Operand(x_values, x_scale))
                weight_grad = float8.weight_gradient(grad, x, grad_TO.dtype).to(weight_dtype)
            if bias_needs:
                bias_grad = grad_TO.sum(0).to(bias_dtype)
            return weight_grad, bias_grad

        of_params = ctx.gradients(products)
        if largest_needs:
            maxima = torch.stack([x_largest, grad.known_largest])
        return x_grad, *of_params, maxima, *[None] * (4 + len(operands))


def _kept(largest: Tensor | None, measured: bool, operands: Sequence[Tensor]) -> Kept:
    return Kept(Operand(*operands) if operands else None, largest, measured)
