"""Attention with grouped key and value heads, to the same or to another sequence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.config import ConfigError, ModelConfig
from megatron.config.features import taking_part
from megatron.kernels.rope import PackedHeads, rotated
from megatron.kernels.switches import uses
from megatron.model.attention_backends import attention_backend
from megatron.model.attention_masks import AttentionKind, AttentionMasks, AttentionScoring, Folding
from megatron.model.caches import LayerCache
from megatron.model.layer_list import LayerState
from megatron.model.norm import AllHeadsNorm, build_qk_norm, l2_norm
from megatron.model.rope import RotaryEmbedding, Temperature
from megatron.parallel.layers import (
    ColumnParallelLinear,
    KVParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from megatron.parallel.shard import Cut, Init, Shard, initial, parameter
from megatron.parallel.tensor_parallel import TensorParallel


class Attention(nn.Module):
    """Projects to queries, keys and values by one GEMM, attends, projects back. Cross-attention
    computes keys and values from the encoder's output, and has no positions. ``recompute`` computes
    the kernel again in the backward pass instead of keeping its inner activations. With a
    ``folding`` parts of the sequences attend by themselves; a cache has its own way to do so."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        tp: TensorParallel,
        recompute: bool,
        kind: AttentionKind = "causal",
        folding: Folding | None = None,
    ) -> None:
        super().__init__()
        attention = config.attention
        self.folding = folding
        self.layer, self.tp, self.recompute = layer, tp, recompute
        self.head_dim = attention.kv_channels
        self.dropout = attention.attention_dropout
        self.biased = kind != "cross"
        plain = self.attend = attention_backend(attention.attention_backend, self.dropout)
        for feature in taking_part():
            self.attend = feature.attention(self.attend, config, layer, tp, kind)
        if tp.context.size > 1 and self.attend is plain:
            raise ConfigError(
                f"--context-parallel-size {tp.context.size}: attention to tokens of other ranks is "
                "a feature whose folder is missing here; add it, or use 1"
            )
        self.scores = AttentionScoring.of(config, layer, tp.group, kind)
        self.rotation = None if kind == "cross" else RotaryEmbedding.of(config, layer)
        self.temperature = None if kind == "cross" else Temperature.of(config.positions, layer)
        self.l2_epsilon = config.norm.norm_epsilon if config.norm.qk_l2_norm else None
        width, bias, init = config.hidden_size, attention.qkv_bias, initial(config)
        heads, groups = attention.num_attention_heads, attention.num_query_groups
        self.sinks: Tensor | None = None
        self.off_by_one = attention.softmax_type == "off-by-one"
        if attention.softmax_type == "learnable":
            # As Megatron and gpt-oss; Xavier's bound would need two sizes.
            normal = Init(config.init_method_std)
            self.sinks = parameter(Shard((heads,), (Cut(0),)), normal, tp.coordinates)
        self.gated = attention.attention_output_gate and kind != "cross"
        self.qkv: QKVParallelLinear | None = None
        if kind == "cross":
            queries = (heads * self.head_dim,)
            self.q = ColumnParallelLinear(width, queries, bias=bias, init=init, tp=tp)
            self.kv = KVParallelLinear(width, groups, self.head_dim, bias=bias, init=init, tp=tp)
        else:
            sizes = width, heads, groups, self.head_dim
            self.qkv = QKVParallelLinear(*sizes, bias=bias, init=init, tp=tp, gated=self.gated)
        qk_norm, self.clip = config.norm.qk_layernorm, attention.clip_qkv
        self.norms_last = config.norm.qk_layernorm_after_rope and kind != "cross"
        self.packed: PackedHeads | None = None  # what is rotated as the projection writes it
        bare = folding is self.clip is None and (self.norms_last or not qk_norm)
        if bare and self.rotation and self.qkv and self.qkv.kv_weight is None:
            ours = heads // tp.group.size, groups // tp.group.size, self.head_dim
            self.packed = PackedHeads(*ours, self.gated, self.rotation.interleaved)
        self.q_norm = build_qk_norm(config, tp, heads) if qk_norm else None
        self.k_norm = build_qk_norm(config, tp, groups) if qk_norm else None
        self.sub_norm = AllHeadsNorm.of(config, heads, tp) if config.norm.sub_norm else None
        self.proj = RowParallelLinear(
            heads * self.head_dim,
            width,
            bias=attention.proj_bias,
            init=initial(config, scaled=True),
            tp=tp,
        )

    def forward(self, x_BSH: Tensor, state: LayerState) -> Tensor:
        """[B, S, H] to [B, S, H]; positions, masks, cache and encoder output come from
        ``state``."""
        packs = self.packed is not None and state.cache is None
        if self.qkv is not None:
            projected = self.qkv(x_BSH, apart=False) if packs else self.qkv(x_BSH)
        elif state.cache is None:
            projected = self.q(x_BSH), *self.kv(state.encoder)
        else:
            return self._attend_encoded(x_BSH, state, state.cache)
        q, k, v, gate_BSND, turned = self._heads(projected, state)
        samples, length = q.shape[:2]
        positions, masks = state.position_ids, state.masks
        if self.folding is not None:
            q, k, v = self.folding.fold(q, k, v)
            positions = masks = None
        # Heads and sequence are transposed only now, so that a kernel's output has the layout that
        # the projection reads.
        norms = (None, None) if self.norms_last else (self.q_norm, self.k_norm)
        q, k, v = self._bounded(q, norms[0]), self._bounded(k, norms[1]), self._bounded(v)
        if self.rotation is not None:
            if not turned:
                angles = self._angles(self.rotation, q, positions, state)
                q, k = self.rotation.rotate(q, angles), self.rotation.rotate(k, angles)
            if self.l2_epsilon is not None:
                q, k = l2_norm(q, self.l2_epsilon), l2_norm(k, self.l2_epsilon)
        if self.temperature is not None:
            q = self.temperature.applied(q, positions)
        if self.norms_last and self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if state.cache is not None:
            y_BSND = state.cache.attend(
                self.layer, q, k, v, self.scores, state.bias, self._sinks(q)
            )
            return self._projected(y_BSND, gate_BSND)
        q_BNSD, k_BKSD, v_BKSD = (x.transpose(1, 2) for x in (q, k, v))
        inputs = (
            q_BNSD,
            k_BKSD,
            v_BKSD,
            masks or AttentionMasks(),
            state.bias if self.biased else None,
            self._sinks(q),
        )
        if self.recompute and q.requires_grad:
            # Recomputed compiled code must not find masks that the first pass made.
            attend = self._attend_unmade if torch.compiler.is_compiling() else self._attend
            y_BNSD = checkpoint(attend, *inputs, use_reentrant=False)
        else:
            y_BNSD = self._attend(*inputs)
        y_BSND = y_BNSD.transpose(1, 2)
        if self.folding is not None:
            y_BSND = self.folding.unfold(y_BSND, samples, length)
        return self._projected(y_BSND, gate_BSND)

    def _heads(
        self, projected: Sequence[Tensor], state: LayerState
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool]:
        """Queries, keys, values and gates, if there are any; True if RoPE is applied already."""
        if self.packed is not None and self.rotation is not None and len(projected) == 1:
            if not uses("rope", projected[0]):
                return *self.packed.views(projected[0]), False
            angles = self._angles(self.rotation, projected[0], state.position_ids, state)
            return *rotated(projected[0], *angles, self.packed), True
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in projected)
        if not self.gated:
            return q, k, v, None, False
        q, gate_BSND = q.unflatten(2, (-1, 2)).unbind(3)
        return q, k, v, gate_BSND, False

    def _angles(
        self, rotation: RotaryEmbedding, x: Tensor, positions_BS: Tensor | None, state: LayerState
    ) -> tuple[Tensor, Tensor]:
        lengths = None if state.cache is None else state.cache.lengths_BS
        whole = x.shape[1] * self.tp.context.size
        return rotation.angles(whole, positions_BS, lengths, x.device, x.dtype)

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

    def _attend_encoded(self, x_BSH: Tensor, state: LayerState, cache: LayerCache) -> Tensor:
        def keys_and_values(encoder_BTH: Tensor) -> tuple[Tensor, Tensor]:
            k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in self.kv(encoder_BTH))
            return self._bounded(k, self.k_norm), self._bounded(v)

        q = self._bounded(self.q(x_BSH).unflatten(-1, (-1, self.head_dim)), self.q_norm)
        attend = cache.attend_encoded
        if cache.neighbors is not None:
            attend = partial(cache.neighbors.attend, state.encoder)
        y_BSND = attend(self.layer, q, keys_and_values, self.scores, self._sinks(q))
        return self.proj(y_BSND.flatten(2))

    def _attend_unmade(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        masks: AttentionMasks,
        bias: Tensor | None,
        sinks: Tensor | None,
    ) -> Tensor:
        return self._attend(q, k, v, masks.unmade(), bias, sinks)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        masks: AttentionMasks,
        bias: Tensor | None,
        sinks: Tensor | None,
    ) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        if not dropout:
            return self.attend(q, k, v, self.scores, masks, 0.0, bias, sinks)
        with self.tp.random_inside():
            return self.attend(q, k, v, self.scores, masks, dropout, bias, sinks)
