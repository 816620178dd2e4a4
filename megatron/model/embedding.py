"""The first layer: token and position embeddings."""

from __future__ import annotations

import torch
from torch import nn

from megatron.config import ModelConfig
from megatron.model.layer_list import Stream
from megatron.parallel.groups import Group
from megatron.parallel.layers import ReplicatedEmbedding, VocabParallelEmbedding
from megatron.parallel.shard import Init


class Embedding(nn.Module):
    """Token embeddings, learned positions if the model has them, dropout.

    Args:
        config: shape of the network, with the vocabulary sizes filled in.
        group: the tensor-parallel group; the token table is cut over it.
    """

    def __init__(self, config: ModelConfig, group: Group) -> None:
        super().__init__()
        assert config.padded_vocab_size and config.unpadded_vocab_size
        assert config.hidden_size and config.max_position_embeddings
        init = Init(config.init_method_std)
        self.word_embeddings = VocabParallelEmbedding(
            config.padded_vocab_size,
            config.unpadded_vocab_size,
            config.hidden_size,
            init=init,
            group=group,
        )
        self.position_embeddings = None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = ReplicatedEmbedding(
                config.max_position_embeddings, config.hidden_size, init=init
            )
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, stream: Stream, project: bool = False) -> Stream:
        """Token ids [B, S] to [B, S, H]; with ``project`` hidden states to logits, as the head of
        a model that shares these weights."""
        if project:
            return stream.with_hidden(self.word_embeddings(stream.hidden, project=True))
        tokens_BS = stream.hidden
        x_BSH = self.word_embeddings(tokens_BS)
        if self.position_embeddings is not None:
            positions = stream.position_ids
            if positions is None:
                positions = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
            x_BSH = x_BSH + self.position_embeddings(positions)
        return stream.with_hidden(self.dropout(x_BSH))
