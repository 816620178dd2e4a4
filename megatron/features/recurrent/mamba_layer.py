"""Mamba-2 instead of attention (Dao and Gu 2024, arXiv:2405.21060, figure 6).

One projection computes a gate, the inputs of the states, the vectors by which each group writes to
and reads from the states, and each head's step. All but gate and steps pass through a short
convolution. Heads are sharded over tensor-parallel ranks together with their groups. If there are
fewer groups than ranks, each group is replicated on neighbouring ranks.

Shapes: B samples, S tokens of this rank, P pieces of sequences of T tokens (see
:mod:`megatron.features.recurrent.passing`), N heads, G groups, R heads of a group, D size of the
state, W head width, X = N x W channels, Y = G x D; all of this rank.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from megatron.config import ModelConfig
from megatron.features.recurrent.conv import CausalConvolution
from megatron.features.recurrent.flags import MambaConfig
from megatron.features.recurrent.passing import Pieces, RecurrentCache
from megatron.features.recurrent.scan import reached, scan, step
from megatron.model.attention_masks import AttentionMasks
from megatron.model.layer_list import LayerState
from megatron.parallel.collectives import start_sum_over_copies
from megatron.parallel.context import Context
from megatron.parallel.layers import ParallelLinear, RowParallelLinear
from megatron.parallel.linear import LinearMap, column_linear
from megatron.parallel.mesh import Group
from megatron.parallel.shard import Cut, Init, Shard, initial, parameter
from megatron.parallel.tensor_parallel import TensorParallel

FIRST_DECAYS = (1.0, 16.0)
"""Bounds of the initial decay rates -A, which are uniformly distributed (Megatron and the
authors)."""
FIRST_STEPS = (1e-3, 0.1)
"""Bounds of the initial steps, which are uniformly distributed on a logarithmic scale (same
sources)."""


class Mamba2(nn.Module):
    """Mamba-2 layer, used instead of the attention of a block. With ``recompute``, the backward
    pass recomputes convolution and states."""

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, recompute: bool):
        super().__init__()
        part, size = config.part(MambaConfig), tp.group.size
        self.layer, self.tp, self.recompute = layer, tp, recompute
        self.limits, self.state_dim = part.step_limits, part.mamba_state_dim
        self.copies, self.groups = (
            max(1, size // part.mamba_num_groups),
            max(1, part.mamba_num_groups // size),
        )
        heads = part.mamba_num_heads or 0
        self.heads, self.head_dim = heads // size, part.mamba_head_dim
        widths = part.width, part.group_width, part.group_width
        bias, init = part.mamba_proj_bias, initial(config)
        self.in_proj = StateProjection(
            config.hidden_size, widths, heads, self.copies, bias=bias, init=init, tp=tp
        )
        self.conv = GroupedConvolution(
            widths, part.mamba_conv_kernel_dim, self.copies, bias=part.mamba_conv_bias, tp=tp
        )
        of_heads = Shard((heads,), (Cut(0),))
        self.dt_bias = parameter(of_heads, Init(function=_first_steps), tp.coordinates)
        self.a_log = parameter(of_heads, Init(function=_first_decays), tp.coordinates)
        self.skip = parameter(of_heads, Init(constant=1.0), tp.coordinates)
        self.norm = GatedNorm(
            part.width,
            part.mamba_num_groups,
            config.norm.norm_epsilon,
            part.mamba_norm_before_gate,
            tp,
        )
        self.out_proj = RowParallelLinear(
            part.width, config.hidden_size, bias=bias, init=initial(config, scaled=True), tp=tp
        )

    def forward(self, x_BSH: Tensor, state: LayerState) -> Tensor:
        """Map [B, S, H] to [B, S, H]. ``state`` has the document boundaries, and the cache in
        generation."""
        gate_BSX, mixed_BSC, dt_BSN = self.in_proj(x_BSH)
        if state.cache is not None:
            inputs = torch.cat([mixed_BSC, dt_BSN], -1)
            y_BSX = cast(RecurrentCache, state.cache).recur(self.layer, inputs, self._continued)
        elif self.recompute and mixed_BSC.requires_grad:
            y_BSX = checkpoint(self._mixed, mixed_BSC, dt_BSN, state.masks, use_reentrant=False)
        else:
            y_BSX = self._mixed(mixed_BSC, dt_BSN, state.masks)
        return self.out_proj(self.norm(y_BSX, gate_BSX))

    def _mixed(self, mixed_BSC: Tensor, dt_BSN: Tensor, masks: AttentionMasks | None) -> Tensor:
        """Return the outputs of the states, [B, S, X], for whole sequences."""
        pieces = Pieces(self.tp.context, masks)
        parts = self._parts(self.conv(pieces.folded(mixed_BSC), pieces))
        dt_PTN, decay_N = self._steps(pieces.folded(dt_BSN)), self._decay(dt_BSN)
        documents_PT = None if pieces.starts is None else pieces.starts.cumsum(1)
        x_PTNW, b_PTGD, c_PTGD = parts
        y_PTNW, final = scan(x_PTNW, dt_PTN, decay_N, b_PTGD, c_PTGD, self.skip, documents_PT)
        if self.tp.context.size > 1:
            kept_PN = torch.exp((dt_PTN * decay_N).sum(1))
            continued_PT = None
            if documents_PT is not None:
                continued_PT = documents_PT == 0
                kept_PN = kept_PN * continued_PT[:, -1:]
            before = pieces.states_before(kept_PN, final, self._decayed)
            y_PTNW = y_PTNW + reached(dt_PTN, decay_N, c_PTGD, before, continued_PT)
        return pieces.unfolded(y_PTNW).flatten(2).to(mixed_BSC.dtype)

    def _continued(
        self, inputs_BSI: Tensor, states: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Continue sequences in generation; see :meth:`RecurrentCache.recur`. The states are the
        last inputs of the convolution, and the heads' states."""
        mixed_BSC, dt_BSN = inputs_BSI.split([inputs_BSI.shape[-1] - self.heads, self.heads], -1)
        last, state = (None, None) if states is None else states
        x_BSNW, b_BSGD, c_BSGD = self._parts(self.conv(mixed_BSC, Pieces(Context()), last))
        dt_BSN, decay_N = self._steps(dt_BSN), self._decay(dt_BSN)
        if state is not None and inputs_BSI.shape[1] == 1:
            x_BNW, dt_BN, b_BGD, c_BGD = (each[:, 0] for each in (x_BSNW, dt_BSN, b_BSGD, c_BSGD))
            y_BNW, state = step(x_BNW, dt_BN, decay_N, b_BGD, c_BGD, self.skip, state)
            y_BSNW = y_BNW.unsqueeze(1)
        else:
            y_BSNW, state = scan(x_BSNW, dt_BSN, decay_N, b_BSGD, c_BSGD, self.skip, state=state)
        return y_BSNW.flatten(2), (self.conv.tail(mixed_BSC, last).to(state.dtype), state)

    def _parts(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split the convolution's output into inputs of the states [..., N, W], and write and read
        vectors [..., G, D]."""
        width, group_width = self.heads * self.head_dim, self.groups * self.state_dim
        x, b, c = mixed.split([width, group_width, group_width], -1)
        of_groups = (each.unflatten(-1, (self.groups, -1)) for each in (b, c))
        return x.unflatten(-1, (self.heads, -1)), *of_groups

    def _steps(self, dt: Tensor) -> Tensor:
        kind = torch.promote_types(dt.dtype, torch.float32)
        dt = F.softplus(dt.to(kind) + self.dt_bias.to(kind))
        return dt if self.limits == (0.0, math.inf) else dt.clamp(*self.limits)

    def _decay(self, like: Tensor) -> Tensor:
        return -torch.exp(self.a_log.to(torch.promote_types(like.dtype, torch.float32)))

    def _decayed(self, kept_BN: Tensor, state_BGDRW: Tensor) -> Tensor:
        return kept_BN.view(len(kept_BN), self.groups, 1, -1, 1) * state_BGDRW


def _first_decays(draws: Tensor) -> Tensor:
    low, high = FIRST_DECAYS
    return torch.log(low + (high - low) * draws)


def _first_steps(draws: Tensor) -> Tensor:
    """Return the biases whose softplus are the initial steps."""
    low, high = map(math.log, FIRST_STEPS)
    steps = torch.exp(low + (high - low) * draws)
    return steps + torch.log(-torch.expm1(-steps))


class StateProjection(ParallelLinear):
    """Projection to gate, inputs of the states, write and read vectors of groups, and steps by one
    GEMM, with weight rows in this order. If there are fewer groups than ranks, the rows of the
    write and read vectors are in ``kv_weight`` and ``kv_bias``, which are part of the same
    canonical parameters as ``weight`` and ``bias``."""

    kv_weight_kept: Any = None

    def __init__(
        self,
        inputs: int,
        widths: tuple[int, int, int],
        heads: int,
        copies: int,
        *,
        bias: bool,
        init: Init,
        tp: TensorParallel,
    ) -> None:
        super().__init__(tp)
        self.copies, parts = copies, (widths[0], *widths, heads)
        local = [part // tp.group.size for part in parts]
        self.local = local[0], local[0] + (sum(local[2:4]) if copies == 1 else 0), local[4]
        cut = Cut(0, parts=parts, held=None if copies == 1 else (0, 1, 4))
        rows = sum(parts)
        self.weight, self.bias = self._parameters_of(rows, inputs, cut, bias, init, part=True)
        self.kv_weight: nn.Parameter | None = None
        self.kv_bias: nn.Parameter | None = None
        if copies > 1:
            cut = Cut(0, parts=parts, held=(2, 3), copies=copies)
            self.kv_weight, self.kv_bias = self._parameters_of(
                rows, inputs, cut, bias, init, part=True
            )

    def forward(self, x_BSI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project [B, S, I] to this rank's gate [B, S, X], inputs of the convolution [B, S, X + 2
        Y] and steps [B, S, N]. In a sequence-parallel region, the outputs are for the whole
        sequence."""
        maps = [LinearMap(self.weight, self.bias, 1, self.kernel, self.weight_kept)]
        if self.kv_weight is not None:
            both = self.kv_weight, self.kv_bias
            maps.append(LinearMap(*both, self.copies, self.kernel, self.kv_weight_kept))
        if self.adapters is not None:
            outputs = self.adapters.outputs(self, x_BSI, maps)
        else:
            outputs = column_linear(x_BSI, maps, self.tp)
        gate, mixed, dt = outputs[0].split(self.local, -1)
        return gate, mixed if len(outputs) == 1 else torch.cat([mixed, outputs[1]], -1), dt


class GroupedConvolution(CausalConvolution):
    """Convolution of ``channels``: the inputs of the states, then the write and read vectors of
    groups. If groups are replicated (``copies`` > 1), their weights are ``kv_weight`` and
    ``kv_bias``."""

    def __init__(
        self,
        channels: tuple[int, int, int],
        width: int,
        copies: int,
        *,
        bias: bool,
        tp: TensorParallel,
    ) -> None:
        super().__init__(channels, width, bias=bias, tp=tp)
        self.copies, self.group = copies, tp.group
        if copies == 1:
            return
        total, init = sum(channels), Init(bound=width**-0.5)
        for prefix, cut in (
            ("", Cut(0, parts=channels, held=(0,))),
            ("kv_", Cut(0, parts=channels, held=(1, 2), copies=copies)),
        ):
            weight = Shard((total, width), (cut,), whole="weight")
            setattr(self, f"{prefix}weight", parameter(weight, init, tp.coordinates))
            if bias:
                of_bias = Shard((total,), (cut,), whole="bias")
                setattr(self, f"{prefix}bias", parameter(of_bias, init, tp.coordinates))

    def taps(self) -> tuple[Tensor, Tensor | None]:
        if self.copies == 1:
            return super().taps()
        of_groups = [self.kv_weight] if self.bias is None else [self.kv_weight, self.kv_bias]
        weight, *biases = _SharedByCopies.apply(self.copies, self.group, *of_groups)
        bias = None if self.bias is None else torch.cat([self.bias, biases[0]])
        return torch.cat([self.weight, weight]), bias


class _SharedByCopies(torch.autograd.Function):
    """Identity on parameters that are replicated on neighbouring ranks. The backward pass sums
    their gradients over these ranks."""

    @staticmethod
    def forward(ctx: Any, copies: int, group: Group, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.copies, ctx.group = copies, group
        return tuple(param.view_as(param) for param in params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(_over_copies(grad, ctx.copies, ctx.group) for grad in grads)


def _over_copies(x: Tensor, copies: int, group: Group) -> Tensor:
    """Sum over the neighbouring ranks that have copies of the same group of heads."""
    return x if copies == 1 else start_sum_over_copies(x.flatten(), copies, group)().view_as(x)


class GatedNorm(nn.Module):
    """RMSNorm of each group of heads, with a SiLU gate that multiplies the values before the norm,
    or after the norm if ``first`` is True."""

    def __init__(
        self, width: int, groups: int, epsilon: float, first: bool, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.weight = parameter(Shard((width,), (Cut(0),)), Init(constant=1.0), tp.coordinates)
        self.first, self.epsilon, self.group = first, epsilon, tp.group
        self.width, self.copies = width // groups, max(1, tp.group.size // groups)
        self.groups = max(1, groups // tp.group.size)

    def forward(self, x_BSX: Tensor, gate_BSX: Tensor) -> Tensor:
        """Normalise and gate ``x_BSX`` [B, S, X]. The result has the same shape and dtype."""
        return _GatedNorm.apply(x_BSX, gate_BSX, self.weight, self)


class _GatedNorm(torch.autograd.Function):
    """Gated norm that saves only its inputs for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x_BSX: Tensor, gate_BSX: Tensor, weight_X: Tensor, norm: GatedNorm
    ) -> Tensor:
        ctx.save_for_backward(x_BSX, gate_BSX, weight_X)
        ctx.norm = norm
        x, gate, weight = _in_groups(norm, x_BSX, gate_BSX, weight_X)
        opened = F.silu(gate)
        entering = x if norm.first else x * opened
        y = entering.mul(_inverse_rms(norm, entering)).mul_(weight)
        return (y.mul_(opened) if norm.first else y).flatten(-2).to(x_BSX.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSX: Tensor) -> tuple[Tensor | None, ...]:
        norm, (x_BSX, gate_BSX, weight_X) = ctx.norm, ctx.saved_tensors
        x, gate, weight = _in_groups(norm, x_BSX, gate_BSX, weight_X)
        grad = grad_BSX.to(x.dtype).unflatten(-1, (norm.groups, -1))
        sigmoid = torch.sigmoid(gate)
        opened = gate * sigmoid
        entering = x if norm.first else x * opened
        inverse = _inverse_rms(norm, entering)
        normed = entering * inverse
        of_opened = grad * normed * weight
        grad = grad * opened if norm.first else grad
        of_weight = (grad * normed).flatten(0, -3).sum(0).flatten()
        grad = grad * weight
        mean = _over_copies((grad * normed).sum(-1, keepdim=True), norm.copies, norm.group)
        of_entering = (grad - normed * (mean / norm.width)).mul_(inverse)
        of_x = of_entering
        if not norm.first:
            of_opened, of_x = of_entering * x, of_entering * opened
        of_gate = of_opened * (sigmoid + opened * (1 - sigmoid))
        return (
            of_x.flatten(-2).to(x_BSX.dtype),
            of_gate.flatten(-2).to(gate_BSX.dtype),
            of_weight.to(weight_X.dtype),
            None,
        )


def _in_groups(norm: GatedNorm, *tensors: Tensor) -> tuple[Tensor, ...]:
    kind = torch.promote_types(tensors[0].dtype, torch.float32)
    return tuple(x.to(kind).unflatten(-1, (norm.groups, -1)) for x in tensors)


def _inverse_rms(norm: GatedNorm, x: Tensor) -> Tensor:
    squares = _over_copies(x.square().sum(-1, keepdim=True), norm.copies, norm.group)
    return torch.rsqrt(squares / norm.width + norm.epsilon)
