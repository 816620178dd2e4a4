"""Models with random weights of a size that tells numbers apart, in float64."""

import torch

from megatron.config import ModelConfig, ParallelConfig
from megatron.families import build_model
from megatron.model.layer_list import LayerStack
from megatron.parallel.shard import shard_of


def random_stack(model: ModelConfig, parallel: ParallelConfig | None = None) -> LayerStack:
    """The layers of a model; norms scale by numbers around 1, all other weights are around 0."""
    draw = torch.Generator().manual_seed(3)
    stack = build_model(model, parallel).double()
    with torch.no_grad():
        for name, param in stack.canonical_parameters():
            whole = torch.randn(shard_of(param).canonical_shape, generator=draw).double()
            param.copy_(shard_of(param).cut(0.3 * whole + ("norm.weight" in name)))
    return stack
