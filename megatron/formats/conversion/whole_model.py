"""A checkpoint's model on one process, without process groups."""

from __future__ import annotations

import torch

from megatron.checkpoint.source import Source, run_of
from megatron.families import build_model
from megatron.model.layer_list import LayerStack
from megatron.parallel.shard import shard_of


@torch.no_grad()
def model_of(source: Source, dtype: torch.dtype, device: torch.device) -> LayerStack:
    """The model of an opened checkpoint, in evaluation mode. Raises CheckpointError if the
    checkpoint is damaged or incomplete."""
    source.require_model()
    with device:
        model = build_model(run_of(source).model).to(dtype)
    for name, param in model.canonical_parameters():
        param.copy_(shard_of(param).cut(source.tensor(name)))
    return model.eval().requires_grad_(False)
