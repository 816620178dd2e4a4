"""Number of parameters that a run with adapters trains, and FLOPs of the adapters."""

from __future__ import annotations

import torch

from megatron.config import RunConfig
from megatron.families import trained_spec
from megatron.features.adapters.flags import AdapterConfig, is_adapter
from megatron.features.adapters.model import is_stacked
from megatron.model.flops import TransformerShape
from megatron.model.layer_list import LayerStack
from megatron.parallel.tensor_parallel import TensorParallel


def _whole(config: RunConfig) -> LayerStack:
    """Return the whole model of the run on the meta device."""
    with torch.device("meta"):
        return LayerStack(trained_spec(config).layers(TensorParallel()), config.parallel)


def with_additions(shape: TransformerShape, config: RunConfig) -> TransformerShape:
    """Return a model's shape with the FLOPs of a run's adapters added."""
    of_stack, of_decoder, model = 0.0, 0.0, _whole(config)
    shares = {
        param: float(layer.share)  # type: ignore[arg-type]
        for layer in model.modules()
        if is_stacked(layer)
        for param in layer.parameters(recurse=False)
    }
    for name, param in model.canonical_parameters():
        if is_adapter(name) and param.dim() > 1:
            flops = 2.0 * param.numel() * shares.get(param, 1.0)
            # Keys and values of cross-attention are computed for the encoder's tokens.
            if name.startswith("decoder.") and ".cross_attention.kv." not in name:
                of_decoder += flops
            else:
                of_stack += flops
    return shape.with_additions(of_stack, of_decoder)


def trained_line(config: RunConfig) -> str:
    """Return a line with the numbers of trained parameters and of all parameters."""
    params = [param for _, param in _whole(config).canonical_parameters()]
    every = sum(param.numel() for param in params)
    trained = sum(param.numel() for param in params if param.requires_grad)
    adapters = config.section(AdapterConfig)
    kind = "DoRA" if adapters.use_dora else "LoRA"
    return (
        f"{kind}: {trained:,} of {every:,} parameters are trained ({trained / every:.2%}); rank "
        f"{adapters.lora_rank}, additions x {adapters.scale:g}"
    )
