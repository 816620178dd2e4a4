"""The transformer block."""

from __future__ import annotations

from torch import nn

from megatron.config import ModelConfig
from megatron.model.attention import Attention
from megatron.model.layer_list import LayerState
from megatron.model.mlp import MLP
from megatron.model.norm import build_norm
from megatron.parallel.layers import Dropout
from megatron.parallel.region import TensorParallel


class Block(nn.Module):
    """Pre-norm attention and MLP, added to the residual stream one after the other, or, with
    ``parallel_residual``, both computed from the same stream.

    Args:
        config: shape of the network.
        layer: number of the block, from 0.
        region: the tensor-parallel ranks.
        recompute_attention: compute the attention kernel again in the backward pass.
    """

    def __init__(
        self, config: ModelConfig, layer: int, region: TensorParallel, recompute_attention: bool
    ) -> None:
        super().__init__()
        post = nn.Identity if not config.post_norm else lambda: build_norm(config, region)
        self.parallel = config.parallel_residual
        self.attention_norm = build_norm(config, region)
        self.attention = Attention(config, layer, region, recompute_attention)
        self.attention_post_norm = post()
        self.mlp_norm = None if config.shared_parallel_norm else build_norm(config, region)
        self.mlp = MLP(config, region)
        self.mlp_post_norm = post()
        self.dropout = Dropout(config.hidden_dropout, region)

    def forward(self, stream: LayerState) -> LayerState:
        """Hidden states [B, S, H] to [B, S, H]."""
        x = stream.hidden
        normed = self.attention_norm(x)
        y = x + self.dropout(self.attention_post_norm(self.attention(normed, stream)))
        if self.mlp_norm is not None:
            normed = self.mlp_norm(x if self.parallel else y)
        y = y + self.dropout(self.mlp_post_norm(self.mlp(normed)))
        return stream.with_hidden(y)
