"""Gated MLP in 8 bits as a single autograd function.

The kernel that computes the activation also casts it. The kernel for the gradient of gate and up
casts that gradient if its scale comes from earlier steps, and otherwise measures its amax. Gate and
up are saved in 16 bits for the backward pass; the activation is not saved.

Shapes: T tokens, H hidden size, F inner width, G = 2F (gate, then up).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.config import ModelConfig
from megatron.features.float8.casts import Cast, Operand, factor_and_scale
from megatron.features.float8.linear import FORWARD, Float8, Kept
from megatron.features.float8.operators.gated_casts import activated, differentiated
from megatron.kernels.switches import uses
from megatron.model.mlp import MLP
from megatron.parallel.later_products import leaves_products
from megatron.parallel.tensor_parallel import autocast_dtype

KINDS = ("swiglu", "geglu", "geglu_erf", "quick_geglu", "squared_reglu")
"""Activations that the fused kernels support."""


def fuse(mlp: Any, model: ModelConfig, float8: Float8) -> None:
    """Make an MLP compute as a single function if possible, by changing its class in place. It must
    be gated, without biases, on one tensor-parallel rank, and have one scale per matrix."""
    config = model.mlp
    bounded = config.activation_func_clamp_value is not None or config.glu_linear_offset
    if type(mlp) is not MLP or config.activation not in KINDS or config.bias or bounded:
        return
    one_scale = float8.recipe in ("tensorwise", "delayed")
    if one_scale and mlp.sub_norm is None and mlp.up.tp.group.size == 1:
        # MLPs of a class share one compiled function; one per MLP would be compiled per block.
        mlp.__class__ = Float8MLP
        vars(mlp)["kind"] = config.activation


class Float8MLP(MLP):
    """MLP that computes as a single function on a GPU with a compiler if both weights are kept in 8
    bits, and otherwise layer by layer. ``kind`` is its activation."""

    kind: str

    def forward(self, x_BSH: Tensor) -> Tensor:
        layers = self.up, self.down
        up, down = (layer.weight_kept or Kept() for layer in layers)
        trained = torch.is_grad_enabled() and self.up.weight.requires_grad
        float8 = self.up.kernel
        if (
            up.weight is None
            or down.weight is None
            or not uses("casts", x_BSH)
            or any(layer.adapters is not None for layer in layers)
            or self.up.weight.requires_grad != self.down.weight.requires_grad
            or leaves_products()
        ):
            return MLP.forward(self, x_BSH)
        assert isinstance(float8, Float8)
        if trained:
            float8.check_tokens(x_BSH.shape[:-1].numel())
        y_TH = _Products.apply(
            x_BSH.flatten(0, -2), self.up.weight, self.down.weight, up.largest, down.largest,
            float8, self.kind, trained, up.measured, *up.weight, *down.weight,
        )  # fmt: skip
        return y_TH.unflatten(0, x_BSH.shape[:-1])


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
        up_largest: Tensor | None,
        down_largest: Tensor | None,
        float8: Float8,
        kind: str,
        trained: bool,
        measured: bool,
        *operands: Tensor,
    ) -> Tensor:
        up, down = _kept(up_largest, down_largest, measured, operands)
        ctx.float8, ctx.kind, ctx.measured, ctx.input_dtype = float8, kind, measured, x_TH.dtype
        x_TH = x_TH.to(autocast_dtype(x_TH))
        x = float8.cast_input(x_TH, up.input_largest, columns=trained)
        h_TG = float8.output(x, float8.weight_rows(up_weight, up), x_TH.dtype)
        earlier, largest = down.input_largest, None
        if earlier is None:
            _, largest = activated(h_TG, kind, FORWARD, None, False)
        factor, _ = factor_and_scale(FORWARD, largest, earlier)
        rows, largest = activated(h_TG, kind, FORWARD, factor, earlier is not None)
        _, scale = factor_and_scale(FORWARD, largest, earlier)
        y = Cast(Operand(rows, scale))
        ctx.save_for_backward(
            h_TG, *(x.columns or (None, None)), x.largest, factor, scale, largest, up_weight,
            down_weight, up_largest, down_largest, *operands,
        )  # fmt: skip
        return float8.output(y, float8.weight_rows(down_weight, down), x_TH.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:
        h_TG, x_values, x_scale, x_largest, factor, scale, largest, *params = ctx.saved_tensors
        up_weight, down_weight, up_largest, down_largest, *operands = params
        float8, dtype = ctx.float8, grad_TH.dtype
        up, down = _kept(up_largest, down_largest, ctx.measured, operands)
        _, up_needs, down_needs, up_measures, down_measures, *_ = ctx.needs_input_grad

        grad = float8.cast_gradient(grad_TH, down.gradient_largest, columns=down_needs)
        grad_TF = float8.input_gradient(grad, float8.weight_columns(down_weight, down), dtype)
        known = up.gradient_largest
        known_factor = None if known is None else factor_and_scale(float8.backward, None, known)[0]
        rows, columns, inner_largest, y_columns = differentiated(
            h_TG, grad_TF, ctx.kind, FORWARD, factor, float8.backward, known_factor
        )
        if known is None:
            inner = float8.cast_gradient(rows, None, columns=up_needs, largest=inner_largest)
        else:
            _, inner_scale = factor_and_scale(float8.backward, inner_largest, known)
            inner = Cast(Operand(rows, inner_scale), Operand(columns, inner_scale), inner_largest)
        x_grad = float8.input_gradient(inner, float8.weight_columns(up_weight, up), dtype)
        up_grad = down_grad = None
        if up_needs:
            x = Cast(columns=Operand(x_values, x_scale))
            up_grad = float8.weight_gradient(inner, x, dtype).to(up_weight.dtype)
        if down_needs:
            y = Cast(columns=Operand(y_columns, scale))
            down_grad = float8.weight_gradient(grad, y, dtype).to(down_weight.dtype)
        return (
            x_grad.to(ctx.input_dtype),
            up_grad,
            down_grad,
            torch.stack([x_largest, inner_largest]) if up_measures else None,
            torch.stack([largest, grad.known_largest]) if down_measures else None,
            *[None] * (4 + len(operands)),
        )


def _kept(
    up: Tensor | None, down: Tensor | None, measured: bool, operands: Sequence[Tensor]
) -> tuple[Kept, Kept]:
    return (
        Kept(Operand(*operands[:2]), up, measured),
        Kept(Operand(*operands[2:]), down, measured),
    )
