"""Gated DeltaNet instead of attention (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464, figure
1), as in Qwen3-Next.

One projection computes queries, keys, values, a gate, and for each value head the fraction of a
value that is stored and the decay of the state. Queries, keys and values pass through a short
convolution. Heads are sharded over tensor-parallel ranks; value heads stay with the key heads that
they share.

Shapes: B samples, S tokens of this rank, P pieces of sequences of T tokens (see
:mod:`megatron.features.recurrent.passing`), K query and key heads, N value heads, D key width, V
value width, C = 2 K D + N V channels of the convolution; all of this rank.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.config import ModelConfig
from megatron.features.recurrent.conv import CausalConvolution
from megatron.features.recurrent.delta import gated_delta_rule, one_step, passed_delta_rule
from megatron.features.recurrent.flags import DeltaConfig
from megatron.features.recurrent.passing import Pieces, RecurrentCache
from megatron.model.attention_masks import AttentionMasks
from megatron.model.layer_list import LayerState
from megatron.model.norm import RMSNorm
from megatron.parallel.context import Context
from megatron.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.shard import Cut, Init, Shard, initial, parameter
from megatron.parallel.tensor_parallel import TensorParallel

FIRST_DECAYS = (1.0, 16.0)
"""Bounds of the initial decay rates, which are uniformly distributed, as in Megatron."""


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet layer, used instead of the attention of a block. With ``recompute``, the
    backward pass recomputes convolution and states. The rows of ``in_proj`` are queries, keys,
    values, gate, stored fractions and decays, in this order.
    """

    def __init__(
        self, config: ModelConfig, layer: int, tp: TensorParallel, recompute: bool
    ) -> None:
        super().__init__()
        part, size = config.part(DeltaConfig), tp.group.size
        self.layer, self.tp, self.recompute = layer, tp, recompute
        self.key_dim, self.value_dim = part.linear_key_head_dim, part.linear_value_head_dim
        heads = part.linear_num_value_heads
        mixed = part.key_width, part.key_width, part.value_width
        self.mixed = [width // size for width in mixed]
        self.widths = [sum(self.mixed), self.mixed[2], 2 * heads // size]
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            (*mixed, part.value_width, heads, heads),
            bias=False,
            init=initial(config),
            tp=tp,
        )
        self.conv = CausalConvolution(mixed, part.linear_conv_kernel_dim, bias=False, tp=tp)
        of_heads = Shard((heads,), (Cut(0),))
        self.dt_bias = parameter(of_heads, Init(constant=1.0), tp.coordinates)
        self.a_log = parameter(of_heads, Init(function=_first_decays), tp.coordinates)
        self.norm = RMSNorm(self.value_dim, config.norm.norm_epsilon, tp, heads=True)
        self.out_proj = RowParallelLinear(
            part.value_width,
            config.hidden_size,
            bias=False,
            init=initial(config, scaled=True),
            tp=tp,
        )

    def forward(self, x_BSH: Tensor, state: LayerState) -> Tensor:
        """Map [B, S, H] to [B, S, H]. ``state`` has the document boundaries, and the cache in
        generation."""
        mixed_BSC, gate, rates = self.in_proj(x_BSH).split(self.widths, -1)
        if state.cache is not None:
            inputs = torch.cat([mixed_BSC, rates], -1)
            y = cast(RecurrentCache, state.cache).recur(self.layer, inputs, self._continued)
        elif self.recompute and mixed_BSC.requires_grad:
            y = checkpoint(self._mixed, mixed_BSC, rates, state.masks, use_reentrant=False)
        else:
            y = self._mixed(mixed_BSC, rates, state.masks)
        y_BSNV, gate_BSNV = (x.unflatten(-1, (-1, self.value_dim)) for x in (y, gate))
        opened = F.silu(gate_BSNV.to(torch.promote_types(gate.dtype, torch.float32)))
        return self.out_proj((self.norm(y_BSNV) * opened).to(y.dtype).flatten(2))

    def _mixed(self, mixed_BSC: Tensor, rates: Tensor, masks: AttentionMasks | None) -> Tensor:
        """Return the outputs of the states, [B, S, N V], for whole sequences."""
        pieces = Pieces(self.tp.context, masks)
        heads = self._heads(self.conv(pieces.folded(mixed_BSC), pieces))
        y_PTNV = passed_delta_rule(*heads, *self._rates(pieces.folded(rates)), pieces)
        return pieces.unfolded(y_PTNV).flatten(2)

    def _continued(
        self, inputs: Tensor, states: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Continue sequences in generation; see :meth:`RecurrentCache.recur`. The states are the
        last inputs of the convolution and the heads' states."""
        mixed_BSC, rates = inputs.split([self.widths[0], self.widths[2]], -1)
        last, state = (None, None) if states is None else states
        heads = self._heads(self.conv(mixed_BSC, Pieces(Context()), last))
        logs, beta = self._rates(rates)
        if state is not None and inputs.shape[1] == 1:
            q, k, v, logs, beta = (x.squeeze(1) for x in (*heads, logs, beta))
            y, state = one_step(q, k, v, logs, beta, state)
            y = y.unsqueeze(1)
        else:
            y, state = gated_delta_rule(*heads, logs, beta, state=state)
        return y.flatten(2), (self.conv.tail(mixed_BSC, last).to(state.dtype), state)

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split the convolution's output into queries and keys [..., K, D] and values [..., N,
        V]."""
        q, k, v = mixed.split(self.mixed, -1)
        q, k = (x.unflatten(-1, (-1, self.key_dim)) for x in (q, k))
        return q, k, v.unflatten(-1, (-1, self.value_dim))

    def _rates(self, rates: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logarithms of the decays, and the fractions of values that are stored, [...,
        N]."""
        kind = torch.promote_types(rates.dtype, torch.float32)
        share, decay = rates.to(kind).chunk(2, -1)
        steps = F.softplus(decay + self.dt_bias.to(kind))
        return -self.a_log.to(kind).exp() * steps, share.sigmoid()


def _first_decays(draws: Tensor) -> Tensor:
    low, high = FIRST_DECAYS
    return torch.log(low + (high - low) * draws)
