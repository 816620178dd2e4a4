"""8-bit floating-point products in the linear layers of the blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megatron.config import ConfigError, RunConfig
from megatron.model.block import Block
from megatron.parallel.float8 import FIRST_CAPABILITY, Float8
from megatron.parallel.layers import ParallelLinear
from megatron.util.processes import is_main_process


def use_float8(blocks: Sequence[nn.Module], config: RunConfig, device: torch.device) -> None:
    """Has the linear layers of these blocks multiply as ``--fp8-format`` says; their parameters
    stay as they are.

    Args:
        blocks: the blocks of this process.
        config: the run; without ``--fp8-format`` nothing is done.
        device: where the model runs.

    Raises:
        ConfigError: the GPU has no 8-bit products.
    """
    fast = config.fast_paths
    if fast.fp8_format is None:
        return
    _check_device(device, fast.fp8_format)
    chosen = fast.float8_blocks(config.model.num_layers)
    float8 = Float8(fast.fp8_format == "hybrid", fast.fp8_recipe == "rowwise")
    for block in blocks:
        assert isinstance(block, Block)
        if block.attention.layer not in chosen:
            continue
        for module in block.modules():
            if isinstance(module, ParallelLinear):
                module.float8 = float8


def _check_device(device: torch.device, name: str) -> None:
    if device.type == "cuda":
        found = torch.cuda.get_device_capability(device)
        if found < FIRST_CAPABILITY:
            needed, has = (".".join(map(str, pair)) for pair in (FIRST_CAPABILITY, found))
            raise ConfigError(
                f"--fp8-format {name} needs a GPU of compute capability {needed} or more (Ada, "
                f"Hopper, Blackwell); {torch.cuda.get_device_name(device)} has {has}. Leave it out"
            )
    elif is_main_process():
        print(
            f"--fp8-format {name}: on a {device.type} 8-bit products are slower than others; good "
            "for trying what they do to the loss",
            flush=True,
        )
