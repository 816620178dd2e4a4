"""Initial values are those of the whole parameter, drawn and cut, wherever they are drawn."""

import pytest
import torch

from megatron.model.layer_list import initialise
from megatron.parallel.random import generator
from megatron.parallel.shard import Cut, Init, Shard


def parameter(shard: Shard, init: Init, values: torch.Tensor) -> torch.nn.Parameter:
    param = torch.nn.Parameter(values)
    param.shard, param.init = shard, init
    return param


@pytest.mark.parametrize("init", [Init(0.02), Init(constant=1.0)], ids=["normal", "constant"])
@pytest.mark.parametrize("shape", [(5,), (64, 33), (8, 16)])
def test_values_are_those_drawn_and_cut(shape, init):
    shard = Shard(shape, (Cut(0),))
    whole = init.draw(shape, generator(3, "layers.0.weight"))
    assert whole.dtype == torch.float32
    views = {
        "in place": torch.empty(shape),
        "strided": torch.empty(*shape[:-1], 2 * shape[-1])[..., ::2],
        "bf16": torch.empty(shape, dtype=torch.bfloat16),
    }
    for name, values in views.items():
        param = parameter(shard, init, values)
        initialise("layers.0.weight", param, 3)
        assert torch.equal(param, whole.to(param.dtype)), name
        assert param.requires_grad and param.grad_fn is None


def test_a_rank_gets_its_share_of_the_whole():
    shard, init = Shard((64, 33), (Cut(0),)), Init(0.02)
    whole = init.draw((64, 33), generator(3, "w"))
    for rank in range(2):
        param = parameter(shard, init, torch.empty(32, 33))
        initialise("w", param, 3, {"tensor": (rank, 2)})
        assert torch.equal(param, whole[32 * rank :][:32])


def test_padding_is_zero():
    """Values do not depend on the padding: the rows without it are drawn."""
    shard, init = Shard((64, 33), (Cut(0, unpadded=50),)), Init(0.02)
    param = parameter(shard, init, torch.empty(64, 33))
    initialise("w", param, 3)
    assert torch.equal(param[:50], init.draw((50, 33), generator(3, "w")))
    assert not param[50:].any()
