"""Adapters of layers that are cut over ranks, without the other ranks."""

import pytest
import torch

from megatron.features.adapters.flags import AdapterConfig
from megatron.features.adapters.layers import Addition, add_adapters
from megatron.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.mesh import Group
from megatron.parallel.shard import Init
from megatron.parallel.tensor_parallel import TensorParallel


def mask_of(rank: int, by_inputs: bool) -> torch.Tensor:
    """Elements of the input that an addition of this rank of two drops."""
    tp = TensorParallel(Group((0, 1), rank))
    width, options = 64, {"bias": False, "init": Init(std=0.1), "tp": tp}
    if by_inputs:
        layer = RowParallelLinear(2 * width, 8, **options)
    else:
        layer = ColumnParallelLinear(width, (16,), **options)
    config = AdapterConfig(lora=True, lora_rank=2, lora_dropout=0.5)
    add_adapters(layer, [Addition()], config)
    torch.manual_seed(3)
    return layer.adapters._dropped(layer, torch.ones(1, 1, width)) == 0


@pytest.mark.parametrize("by_inputs", [False, True])
def test_ranks_drop_what_each_has(by_inputs):
    """Ranks with the same input drop the same elements, those with other features others."""
    first, second = mask_of(0, by_inputs), mask_of(1, by_inputs)
    assert 0 < first.sum() < first.numel()
    assert torch.equal(first, second) != by_inputs
