"""Initial values are those of the whole parameter, drawn and cut, wherever they are drawn."""

import pytest
import torch
from small_gpts import VOCAB, small_config
from torch import nn

from megatron.families import build_model
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


@pytest.mark.parametrize("init", [Init(0.02), Init(xavier=True)], ids=["normal", "xavier"])
def test_a_rank_gets_its_share_of_the_whole(init):
    shard = Shard((64, 33), (Cut(0),))
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


def test_xavier_draws_every_matrix_as_torch_does():
    """By the fans of the whole matrix without padding; scaled initialisations are the same."""
    stack = build_model(small_config(init_method_xavier_uniform=True))
    matrices = 0
    for name, param in stack.canonical_parameters():
        initialise(name, param, 3)
        if param.dim() == 2:
            rows = VOCAB if name.startswith("embedding.word") else len(param)
            drawn = torch.empty(rows, param.shape[1])
            expected = nn.init.xavier_uniform_(drawn, generator=generator(3, name))
            assert torch.equal(param[:rows], expected), name
            matrices += 1
    assert matrices == 2 + 4 * 2
