"""Causal self-attention with grouped key and value heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.config import ModelConfig
from megatron.model.attention_backends import Scores, attention_backend
from megatron.model.attention_masks import AttentionMasks
from megatron.model.layer_list import LayerState
from megatron.model.norm import build_head_norm
from megatron.model.rope import Rotation, apply_rope
from megatron.parallel.layers import QKVParallelLinear, RowParallelLinear
from megatron.parallel.random import tensor_parallel_random
from megatron.parallel.region import TensorParallel
from megatron.parallel.shard import Init


class Attention(nn.Module):
    """Projects to queries, keys and values in one product, attends, projects back.

    Args:
        config: shape of the network.
        layer: number of the block, from 0: its place in a cache, and whether it has a window.
        region: the tensor-parallel ranks; heads are cut over it.
        recompute: compute the attention kernel again in the backward pass instead of keeping its
            inner activations.
    """

    def __init__(
        self, config: ModelConfig, layer: int, region: TensorParallel, recompute: bool
    ) -> None:
        super().__init__()
        assert config.hidden_size and config.num_layers and config.kv_channels
        assert config.num_attention_heads and config.num_query_groups
        self.layer, self.group, self.recompute = layer, region.group, recompute
        self.head_dim = config.kv_channels
        self.dropout = config.attention_dropout
        self.attend = attention_backend(config.attention_backend)
        self.scores = Scores.of(config, layer, region.group)
        self.rotation = Rotation.of(config, layer)
        self.qkv = QKVParallelLinear(
            config.hidden_size,
            config.num_attention_heads,
            config.num_query_groups,
            self.head_dim,
            bias=config.qkv_bias,
            init=Init(config.init_method_std),
            region=region,
        )
        self.q_norm = build_head_norm(config, region) if config.qk_layernorm else None
        self.k_norm = build_head_norm(config, region) if config.qk_layernorm else None
        self.proj = RowParallelLinear(
            config.num_attention_heads * self.head_dim,
            config.hidden_size,
            bias=config.attention_bias,
            init=Init(config.init_method_std / (2 * config.num_layers) ** 0.5),
            region=region,
        )

    def forward(self, x_BSH: Tensor, stream: LayerState) -> Tensor:
        """[B, S, H] to [B, S, H]; positions, documents and cache come from ``stream``."""
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in self.qkv(x_BSH))
        # Heads and sequence change places after all this, so that a kernel gives its output in the
        # order in which the projection takes it.
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotation is not None:
            cached = stream.cache is not None
            angles = self.rotation.angles(q.shape[1], stream.position_ids, cached, q.device)
            q, k = apply_rope(q, *angles), apply_rope(k, *angles)
        q_BNSD, k_BKSD, v_BKSD = (x.transpose(1, 2) for x in (q, k, v))
        if stream.cache is not None:
            k_BKSD, v_BKSD = stream.cache.extend(self.layer, k_BKSD, v_BKSD)
        masks = stream.masks or AttentionMasks()
        if self.recompute and x_BSH.requires_grad:
            # Compiled code must find nothing changed by what it computes again.
            again = self._attend_anew if torch.compiler.is_compiling() else self._attend
            y_BNSD = checkpoint(again, q_BNSD, k_BKSD, v_BKSD, masks, use_reentrant=False)
        else:
            y_BNSD = self._attend(q_BNSD, k_BKSD, v_BKSD, masks)
        return self.proj(y_BNSD.transpose(1, 2).flatten(2))

    def _attend_anew(self, q: Tensor, k: Tensor, v: Tensor, masks: AttentionMasks) -> Tensor:
        return self._attend(q, k, v, masks.anew())

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, masks: AttentionMasks) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        if not dropout:
            return self.attend(q, k, v, self.scores, masks, 0.0)
        with tensor_parallel_random(self.group):
            return self.attend(q, k, v, self.scores, masks, dropout)
