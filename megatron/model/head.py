"""The last layers: final norm and output head."""

from __future__ import annotations

from torch import nn

from megatron.config import ModelConfig
from megatron.model.layer_list import Stream
from megatron.model.norm import build_norm
from megatron.parallel.groups import Group
from megatron.parallel.layers import VocabParallelEmbedding
from megatron.parallel.shard import Init


class FinalNorm(nn.Module):
    """The norm in front of the head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = build_norm(config)

    def forward(self, stream: Stream) -> Stream:
        """Hidden states [B, S, H] to [B, S, H]."""
        return stream.with_hidden(self.norm(stream.hidden))


class OutputHead(VocabParallelEmbedding):
    """Output head with weights of its own, cut like the token table.

    Args:
        config: shape of the network, with the vocabulary sizes filled in.
        group: the tensor-parallel group.
    """

    def __init__(self, config: ModelConfig, group: Group) -> None:
        assert config.padded_vocab_size and config.unpadded_vocab_size and config.hidden_size
        super().__init__(
            config.padded_vocab_size,
            config.unpadded_vocab_size,
            config.hidden_size,
            init=Init(config.init_method_std),
            group=group,
        )

    def forward(self, stream: Stream) -> Stream:  # type: ignore[override]
        """Hidden states [B, S, H] to this rank's logits [B, S, V / tensor size]."""
        return stream.with_hidden(super().forward(stream.hidden, project=True))
