"""Causal self-attention with grouped key and value heads."""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.config import ModelConfig
from megatron.model.attention_backends import attention_backend
from megatron.model.layer_list import Stream
from megatron.model.rope import apply_rope, rope_table
from megatron.parallel.layers import QKVParallelLinear, RowParallelLinear
from megatron.parallel.random import tensor_parallel_random
from megatron.parallel.region import TensorParallel
from megatron.parallel.shard import Init


class Attention(nn.Module):
    """Projects to queries, keys and values in one product, attends, projects back.

    Args:
        config: shape of the network.
        layer: number of the block, from 0; names its place in a cache.
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
        assert config.max_position_embeddings
        self.layer, self.group, self.recompute = layer, region.group, recompute
        self.head_dim = config.kv_channels
        self.dropout = config.attention_dropout
        self.attend = attention_backend(config.attention_backend)
        rope = config.position_embedding_type == "rope"
        self.rotated = int(self.head_dim * config.rotary_percent) if rope else 0
        self.rotary_base = config.rotary_base
        self.max_positions = config.max_position_embeddings
        self.qkv = QKVParallelLinear(
            config.hidden_size,
            config.num_attention_heads,
            config.num_query_groups,
            self.head_dim,
            bias=config.add_bias_linear or config.add_qkv_bias,
            init=Init(config.init_method_std),
            region=region,
        )
        self.proj = RowParallelLinear(
            config.num_attention_heads * self.head_dim,
            config.hidden_size,
            bias=config.add_bias_linear,
            init=Init(config.init_method_std / (2 * config.num_layers) ** 0.5),
            region=region,
        )

    def forward(self, x_BSH: Tensor, stream: Stream) -> Tensor:
        """[B, S, H] to [B, S, H]; positions, documents and cache come from ``stream``."""
        q_BNSD, k_BKSD, v_BKSD = (
            x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in self.qkv(x_BSH)
        )
        if self.rotated:
            cos, sin = self._angles(stream, q_BNSD)
            q_BNSD, k_BKSD = apply_rope(q_BNSD, cos, sin), apply_rope(k_BKSD, cos, sin)
        if stream.cache is not None:
            k_BKSD, v_BKSD = stream.cache.extend(self.layer, k_BKSD, v_BKSD)
        mask = stream.attention_mask
        if self.recompute and x_BSH.requires_grad:
            y_BNSD = checkpoint(self._attend, q_BNSD, k_BKSD, v_BKSD, mask, use_reentrant=False)
        else:
            y_BNSD = self._attend(q_BNSD, k_BKSD, v_BKSD, mask)
        return self.proj(y_BNSD.transpose(1, 2).flatten(2))

    def _angles(self, stream: Stream, q_BNSD: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rope_table(self.max_positions, self.rotated, self.rotary_base, q_BNSD.device)
        if stream.position_ids is None:
            length = q_BNSD.shape[2]
            return cos[:length], sin[:length]
        at_B1S = stream.position_ids.unsqueeze(1)
        return cos[at_B1S], sin[at_B1S]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        if not dropout:
            return self.attend(q, k, v, mask, 0.0)
        with tensor_parallel_random(self.group):
            return self.attend(q, k, v, mask, dropout)
