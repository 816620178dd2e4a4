"""Selection of the layers that compute in 8 bits, and warnings about a slow device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megatron.config import ConfigError, RunConfig
from megatron.engine.compilation import why_eager
from megatron.features.float8.flags import Float8Flags
from megatron.features.float8.linear import FIRST_CAPABILITY, Float8
from megatron.features.float8.mlp import fuse
from megatron.kernels.compiler import missing_compiler
from megatron.model.block import Block
from megatron.parallel.layers import ParallelLinear
from megatron.parallel.shard import shard_of
from megatron.util.processes import is_main_process


def use_float8(blocks: Sequence[nn.Module], config: RunConfig) -> None:
    """Change linear layers of these blocks in place to compute in 8 bits, as ``--fp8-format``
    requests. Raises ConfigError if 8-bit GEMMs do not support a layer's sizes."""
    fast = Float8Flags.of(config.fast_paths)
    if fast.fp8_format is None:
        return
    chosen = fast.float8_blocks(config.model.num_layers)
    float8 = Float8(fast.fp8_format == "hybrid", fast.fp8_recipe)
    for block in blocks:
        assert isinstance(block, Block)
        if block.layer not in chosen:
            continue
        for name, module in block.named_modules():
            if isinstance(module, ParallelLinear):
                _check_sizes(f"{name} in block {block.layer}", module, fast.fp8_format, float8)
                module.kernel = float8
        fuse(getattr(block, "mlp", None), config.model, float8)


def _check_sizes(name: str, layer: ParallelLinear, form: str, float8: Float8) -> None:
    """Raise ConfigError for a layer whose sizes 8-bit GEMMs do not support. This covers layers that
    features add, which :func:`check_float8_flags` does not check."""
    for param in layer.parameters(recurse=False):
        shard, places = shard_of(param), layer.tp.coordinates
        sizes = shard.local_shape(places)
        if len(sizes) == 2 and any(size % float8.multiple for size in sizes):
            rank = " on each tensor-parallel rank" if layer.tp.group.size > 1 else ""
            raise ConfigError(
                f"--fp8-format {form} needs sizes that are multiples of {float8.multiple}: the "
                f"weight of {name} is {sizes[0]} x {sizes[1]}{rank}; choose widths and heads of "
                "this layer so that they are, or leave --fp8-format out"
            )


def check_float8(config: RunConfig, device: torch.device) -> None:
    """Check the device. Raises ConfigError if ``--fp8-format`` is given and the GPU has no 8-bit
    GEMMs. Prints a line if steps will be slower than in bfloat16."""
    fast = Float8Flags.of(config.fast_paths)
    if fast.fp8_format is None:
        return
    named = f"--fp8-format {fast.fp8_format}"
    if device.type != "cuda":
        _say(
            f"{named}: on a {device.type} 8-bit GEMMs are slower than others; useful only to study "
            "their effect on the loss"
        )
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < FIRST_CAPABILITY:
        needed, has = (".".join(map(str, pair)) for pair in (FIRST_CAPABILITY, capability))
        raise ConfigError(
            f"{named} needs a GPU of compute capability {needed} or more (Ada, Hopper, Blackwell); "
            f"{torch.cuda.get_device_name(device)} has {has}. Leave it out"
        )
    if fast.fp8_recipe == "blockwise":
        _check_blockwise(device, capability)
    slow = _why_float8_is_slow(config, device)
    if slow is not None:
        _say(f"{named}: {slow}")


def _why_float8_is_slow(config: RunConfig, device: torch.device) -> str | None:
    """Return why casts are not fused into the kernels of compiled blocks, and the remedy. Return
    None if they are fused."""
    slower = "which makes a step slower than in bfloat16"
    alone = "casts are kernels of their own, which can make a step slower than in bfloat16"
    missing = missing_compiler(device.type)
    if missing:
        return f"{missing}; casts run operator by operator, {slower}. Install it, or leave fp8 out"
    eager = why_eager(config, device)
    if eager:
        return f"--torch-compile {eager}; {alone}. --torch-compile on compiles the blocks"
    return None


def _check_blockwise(device: torch.device, capability: tuple[int, int]) -> None:
    cuda = torch.version.cuda or "0.0"
    if capability[0] == 9 and tuple(map(int, cuda.split(".")[:2])) >= (12, 9):
        return
    raise ConfigError(
        "--fp8-recipe blockwise needs a GPU of compute capability 9 (Hopper) and a torch for CUDA "
        f"12.9 or later; {torch.cuda.get_device_name(device)} has "
        f"{'.'.join(map(str, capability))}, and torch is for {cuda}. Use --fp8-recipe tensorwise "
        "or rowwise"
    )


def _say(line: str) -> None:
    if is_main_process():
        print(line, flush=True)
