"""Model with compressed layers, and checks that a run's flags allow compression."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from megatron.config import ConfigError, RunConfig
from megatron.features.compression.layers import (
    compressed_layers,
    compressed_modules,
    is_scores,
    require_matches,
)
from megatron.features.compression.settings import HEAD, SECTION, Compression
from megatron.model.layer_list import LayerSpec
from megatron.model.spec import ModelSpec
from megatron.parallel.tensor_parallel import TensorParallel


def with_compression(spec: ModelSpec, config: RunConfig, compression: Compression) -> ModelSpec:
    """Return the model specification with the compressed layers of a run. Raises ConfigError if a
    pattern matches none of its modules, or if two groups of a technique match the same module."""
    with torch.device("meta"):
        built = [(each.name, each.build()) for each in spec.layers(TensorParallel())]
    names = [name for prefix, top in built for name, _ in compressed_modules(top, prefix)]
    require_matches(compression, names)
    head = compression.techniques.get(HEAD)
    heads = config.model.attention.num_attention_heads
    if head is not None and head.shared["num_heads"] != heads:
        raise ConfigError(
            f"{SECTION}.{HEAD}.shared_parameters.num_heads is "
            f"{head.shared['num_heads']}, and the model has --num-attention-heads {heads}"
        )
    for prefix, top in built:
        list(compressed_layers(compression, top, prefix))  # raises if a module does not fit

    def layers(tp: TensorParallel) -> list[LayerSpec]:
        return [replace(each, build=partial(_build, each, compression)) for each in spec.layers(tp)]

    return replace(
        spec,
        layers=layers,
        is_addition=lambda name: is_scores(name) or spec.is_addition(name),
    )


def _build(spec: LayerSpec, compression: Compression) -> nn.Module:
    module = spec.build()
    for layer in compressed_layers(compression, module, spec.name):
        layer.wrap()
    return module


def check(config: RunConfig, compression: Compression) -> None:
    """Raise ConfigError if a run's flags contradict ``compression_training``."""
    if not compression.techniques:
        return
    fast, optimizer = config.fast_paths, config.optimizer.optimizer
    if fast.in_8_bits:
        raise ConfigError(
            f"--fp8-format {vars(fast)['fp8_format']} contradicts {SECTION}: layers multiply by "
            "the weights in 8 bits that were cast before they are compressed; leave one of them out"
        )
    lora = next((s for s in config.sections if getattr(s, "lora", False)), None)
    if lora is not None:
        raise ConfigError(
            f"--lora contradicts {SECTION}: weights that are frozen are not compressed; leave one "
            "of them out"
        )
    if compression.moq is None:
        return
    if config.precision.states is not None:
        raise ConfigError(
            f"{SECTION}.weight_quantization overwrites the weights that are computed with, and "
            "needs main weights of its own in float32: leave the dtypes of the optimizer's states "
            "out, or set quantize_weight_in_forward"
        )
    whole = config.engine.zero_stage == 0 and not config.precision.fp16
    if config.checkpoint.checkpoint_format == "deepspeed" and whole:
        raise ConfigError(
            "--checkpoint-format deepspeed, --zero-stage 0: DeepSpeed saves the weights that are "
            f"computed with, which {SECTION}.weight_quantization overwrites; use --zero-stage 1 or "
            "--checkpoint-format safetensors"
        )
    if optimizer == "schedule_free":
        raise ConfigError(
            f"--optimizer {optimizer} contradicts {SECTION}.weight_quantization, since both set "
            "the weights that are computed with: use adam, or set quantize_weight_in_forward"
        )
