"""What comes before the output head."""

from __future__ import annotations

from torch import nn

from megatron.config import ModelConfig
from megatron.model.layer_list import Stream
from megatron.model.norm import build_norm
from megatron.parallel.region import TensorParallel


class FinalNorm(nn.Module):
    """The norm in front of the head."""

    def __init__(self, config: ModelConfig, region: TensorParallel) -> None:
        super().__init__()
        self.norm = build_norm(config, region)

    def forward(self, stream: Stream) -> Stream:
        """Hidden states [B, S, H] to [B, S, H]."""
        return stream.with_hidden(self.norm(stream.hidden))
