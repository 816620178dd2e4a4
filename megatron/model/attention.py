"""Self-attention: projections, RoPE, norms of queries and keys, and the attention kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.config import ConfigError, ModelConfig
from megatron.config.features import taking_part
from megatron.kernels.rope import PackedHeads, rotated
from megatron.kernels.switches import uses
from megatron.model.attention_backends import attention_backend
from megatron.model.attention_masks import AttentionKind, AttentionMasks, AttentionScoring
from megatron.model.layer_list import LayerState
from megatron.model.norm import AllHeadsNorm, build_qk_norm, l2_norm
from megatron.model.rope import RotaryEmbedding, Temperature
from megatron.parallel.layers import QKVParallelLinear, RowParallelLinear
from megatron.parallel.shard import Cut, Init, Shard, initial, parameter
from megatron.parallel.tensor_parallel import TensorParallel


class Attention(nn.Module):
    """Grouped-query attention, with one GEMM for queries, keys and values. With ``recompute``, the
    backward pass recomputes the attention kernel instead of keeping its activations."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        tp: TensorParallel,
        recompute: bool,
        kind: AttentionKind = "causal",
    ) -> None:
        super().__init__()
        attention = config.attention
        self.layer, self.tp, self.recompute = layer, tp, recompute
        self.head_dim = attention.kv_channels
        self.dropout = attention.attention_dropout
        plain = self.attend = attention_backend(attention.attention_backend, self.dropout)
        for feature in taking_part():
            self.attend = feature.attention(self.attend, config, layer, tp, kind)
        if tp.context.size > 1 and self.attend is plain:
            raise ConfigError(
                f"--context-parallel-size {tp.context.size}: attention to tokens of other ranks is "
                "a feature whose folder is missing here; add it, or use 1"
            )
        self.scores = AttentionScoring.of(config, layer, tp.group, kind)
        self.rotation = RotaryEmbedding.of(config, layer)
        self.temperature = Temperature.of(config.positions, layer)
        self.l2_epsilon = config.norm.norm_epsilon if config.norm.qk_l2_norm else None
        heads, groups = attention.num_attention_heads, attention.num_query_groups
        self.sinks: Tensor | None = None
        self.off_by_one = attention.softmax_type == "off-by-one"
        if attention.softmax_type == "learnable":
            # As in Megatron and gpt-oss: Xavier initialisation would need a matrix.
            normal = Init(config.init_method_std)
            self.sinks = parameter(Shard((heads,), (Cut(0),)), normal, tp.coordinates)
        self.gated = attention.attention_output_gate
        qk_norm, self.clip = config.norm.qk_layernorm, attention.clip_qkv
        self.norms_last = config.norm.qk_layernorm_after_rope
        self.packed: PackedHeads | None = None  # applies RoPE to the packed projection
        self.add_projections(config, heads, groups)
        self.q_norm = build_qk_norm(config, tp, heads) if qk_norm else None
        self.k_norm = build_qk_norm(config, tp, groups) if qk_norm else None
        self.sub_norm = AllHeadsNorm.of(config, heads, tp) if config.norm.sub_norm else None
        self.proj = RowParallelLinear(
            heads * self.head_dim,
            config.hidden_size,
            bias=attention.proj_bias,
            init=initial(config, scaled=True),
            tp=tp,
        )

    def add_projections(self, config: ModelConfig, heads: int, groups: int) -> None:
        """Add the projections to ``heads`` query heads and to ``groups`` key and value heads."""
        self.qkv = QKVParallelLinear(
            config.hidden_size,
            heads,
            groups,
            self.head_dim,
            bias=config.attention.qkv_bias,
            init=initial(config),
            tp=self.tp,
            gated=self.gated,
        )
        bare = self.clip is None and (self.norms_last or not config.norm.qk_layernorm)
        if bare and self.rotation and self.qkv.kv_weight is None:
            ours = heads // self.tp.group.size, groups // self.tp.group.size, self.head_dim
            self.packed = PackedHeads(*ours, self.gated, self.rotation.interleaved)

    def forward(self, x_BSH: Tensor, state: LayerState) -> Tensor:
        """Map [B, S, H] to [B, S, H], with the positions, masks and KV cache of ``state``."""
        packs = self.packed is not None and state.cache is None
        projected = self.qkv(x_BSH, apart=False) if packs else self.qkv(x_BSH)
        q, k, v, gate_BSND, turned = self._heads(projected, state)
        return self._projected(self.attended(q, k, v, state, turned), gate_BSND)

    def attended(
        self, q: Tensor, k: Tensor, v: Tensor, state: LayerState, turned: bool = False
    ) -> Tensor:
        """Attend with projected queries [B, S, N, D], keys and values [B, T, K, D], and return
        [B, S, N, D]. Applies norms and RoPE first; ``turned`` means that RoPE has already been
        applied."""
        # Transposed only here, so that a kernel's output has the layout that ``proj`` reads.
        norms = (None, None) if self.norms_last else (self.q_norm, self.k_norm)
        q, k, v = self._bounded(q, norms[0]), self._bounded(k, norms[1]), self._bounded(v)
        if self.rotation is not None:
            if not turned:
                angles = self._angles(self.rotation, q, state)
                q, k = self.rotation.rotate(q, angles), self.rotation.rotate(k, angles)
            if self.l2_epsilon is not None:
                q, k = l2_norm(q, self.l2_epsilon), l2_norm(k, self.l2_epsilon)
        if self.temperature is not None:
            q = self.temperature.applied(q, state.position_ids)
        if self.norms_last and self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if state.cache is not None:
            return state.cache.attend(self.layer, q, k, v, self.scores, state.bias, self._sinks(q))
        q_BNSD, k_BKSD, v_BKSD = (x.transpose(1, 2) for x in (q, k, v))
        inputs = (
            q_BNSD,
            k_BKSD,
            v_BKSD,
            state.masks or AttentionMasks(),
            state.bias,
            self._sinks(q),
        )
        if self.recompute and q.requires_grad:
            y_BNSD = checkpoint(self._attend, *inputs, use_reentrant=False)
        else:
            y_BNSD = self._attend(*inputs)
        return y_BNSD.transpose(1, 2)

    def _heads(
        self, projected: Sequence[Tensor], state: LayerState
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool]:
        """Return queries, keys, values, gates (or None), and whether RoPE has been applied."""
        if self.packed is not None and self.rotation is not None and len(projected) == 1:
            if not uses("rope", projected[0]):
                return *self.packed.views(projected[0]), False
            angles = self._angles(self.rotation, projected[0], state)
            return *rotated(projected[0], *angles, self.packed), True
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in projected)
        if not self.gated:
            return q, k, v, None, False
        q, gate_BSND = q.unflatten(2, (-1, 2)).unbind(3)
        return q, k, v, gate_BSND, False

    def _angles(
        self, rotation: RotaryEmbedding, x: Tensor, state: LayerState
    ) -> tuple[Tensor, Tensor]:
        lengths = None if state.cache is None else state.cache.lengths_BS
        whole = x.shape[1] * self.tp.context.size
        return rotation.angles(whole, state.position_ids, lengths, x.device, x.dtype)

    def _projected(self, y_BSND: Tensor, gate_BSND: Tensor | None) -> Tensor:
        if gate_BSND is not None:
            y_BSND = y_BSND * torch.sigmoid(gate_BSND)
        if self.sub_norm is not None:
            y_BSND = self.sub_norm(y_BSND)
        return self.proj(y_BSND.flatten(2))

    def _bounded(self, heads: Tensor, norm: nn.Module | None = None) -> Tensor:
        heads = heads if norm is None else norm(heads)
        return heads if self.clip is None else heads.clamp(-self.clip, self.clip)

    def _sinks(self, q_BSND: Tensor) -> Tensor | None:
        return q_BSND.new_zeros(q_BSND.shape[2]) if self.off_by_one else self.sinks

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        masks: AttentionMasks,
        bias: Tensor | None,
        sinks: Tensor | None,
    ) -> Tensor:
        if self.recompute and q.requires_grad and torch.compiler.is_compiling():
            masks = masks.unmade()  # must not reuse masks cached by the first forward pass
        dropout = self.dropout if self.training else 0.0
        if not dropout:
            return self.attend(q, k, v, self.scores, masks, 0.0, bias, sinks)
        with self.tp.random_inside():
            return self.attend(q, k, v, self.scores, masks, dropout, bias, sinks)
