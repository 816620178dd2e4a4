"""The transformer block."""

from __future__ import annotations

from torch import nn

from megatron.config import ModelConfig
from megatron.model.attention import Attention
from megatron.model.layer_list import Stream
from megatron.model.mlp import MLP
from megatron.model.norm import build_norm
from megatron.parallel.layers import Dropout
from megatron.parallel.region import TensorParallel


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream.

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
        self.attention_norm = build_norm(config, region)
        self.attention = Attention(config, layer, region, recompute_attention)
        self.mlp_norm = build_norm(config, region)
        self.mlp = MLP(config, region)
        self.dropout = Dropout(config.hidden_dropout, region)

    def forward(self, stream: Stream) -> Stream:
        """Hidden states [B, S, H] to [B, S, H]."""
        x = stream.hidden
        x = x + self.dropout(self.attention(self.attention_norm(x), stream))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return stream.with_hidden(x)
