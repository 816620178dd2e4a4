"""Layers that drop tokens, against DeepSpeed's own wrapper and schedule, and against masks."""

import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from deepspeed.ops.random_ltd import dropping_utils
from deepspeed.runtime.data_pipeline.data_routing.basic_layer import RandomLayerTokenDrop
from deepspeed.runtime.data_pipeline.data_routing.scheduler import RandomLTDScheduler
from torch import nn

from megatron.config import ModelFlags, ParallelConfig
from megatron.families import spec_of
from megatron.features.random_ltd.flags import TokenDropping
from megatron.features.random_ltd.layers import (
    LayerTokens,
    begin_step,
    kept_tokens,
    put_back,
    with_dropping,
)
from megatron.model.attention_masks import AttentionMasks
from megatron.model.layer_list import LayerState, layer_sequence
from megatron.parallel.random import derive_seed
from megatron.parallel.tensor_parallel import TensorParallel

LAYERS, SAMPLES, LENGTH, KEPT, SEED = 3, 2, 16, 6, 5
SIZES = {
    "num_layers": LAYERS + 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": LENGTH,
    "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
LLAMA = SIZES | {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True}
BERT = SIZES | {"family": "bert"}
DROPPING = TokenDropping("ltd", LAYERS + 2, (1, 2, 3), KEPT, LENGTH, 10, 1)


def sections(seed):
    rng = random.Random(seed)
    increment = rng.choice([1, 8, 16, 24, 64])
    lowest = increment + rng.randrange(0, 300)
    total = rng.randrange(2, 30)
    return {
        "total_layer_num": total, "random_ltd_layer_num": rng.randrange(1, total),
        "random_ltd_schedule": {
            "min_value": lowest, "max_value": lowest + rng.choice([0, rng.randrange(2000)]),
            "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": rng.randrange(1, 500), "seq_per_step": increment},
        },
        "global_batch_size": rng.randrange(1, 9), "layer_token_lr_schedule": {"enabled": False},
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(30))
def test_reserved_lengths_and_state(seed):
    section = sections(seed)
    theirs, schedule = RandomLTDScheduler(section), section["random_ltd_schedule"]
    growth, batch = schedule["schedule_config"], section["global_batch_size"]
    ours = TokenDropping(
        "ltd", section["total_layer_num"], tuple(range(section["random_ltd_layer_num"])),
        schedule["min_value"], schedule["max_value"], growth["require_steps"],
        growth["seq_per_step"],
    )  # fmt: skip
    counting = LayerTokens(ours, lambda steps: steps * batch, ())
    assert counting.state == theirs.state_dict()
    lengths = []
    for step in range(700):
        theirs.update_seq(step)
        lengths.append(theirs.get_current_seq())
        assert ours.reserved(step) == lengths[-1]
        if step % 90 == 0:
            counting.after_step(None, SimpleNamespace(iteration=step + 1))
            assert counting.state == theirs.state_dict()
    changes = [n for n in range(700) if n == 0 or lengths[n] != lengths[n - 1]]
    changing = [(step, kept) for step, kept in ours.changes() if step < 700]
    assert changing == [(step, lengths[step]) for step in changes]


class Operators:
    """DeepSpeed's operators for CUDA, as they are documented, by indexing."""

    @staticmethod
    def token_sort_(indices, length):
        return indices.sort(-1).values

    @staticmethod
    def token_gather(x, indices, batch_first):
        assert batch_first
        return torch.stack([row[kept.long()] for row, kept in zip(x, indices, strict=True)])

    @staticmethod
    def token_scatter_(x, values, indices, batch_first):
        assert batch_first
        for row, kept, each in zip(x, indices, values, strict=True):
            row[kept.long()] = each
        return x


@pytest.fixture
def operators(monkeypatch):
    monkeypatch.setattr(dropping_utils, "random_ltd_module", Operators)


def test_draws(operators):
    """Equal weights without replacement, from the same generator."""
    torch.manual_seed(SEED)
    theirs, mask = dropping_utils.gpt_sample_tokens(KEPT, LENGTH, SAMPLES, LAYERS)
    ours = kept_tokens(SEED, LAYERS, SAMPLES, LENGTH, KEPT, torch.device("cpu"))
    assert mask is None and torch.equal(ours, theirs.long())
    assert not torch.equal(ours[0], ours[1]), "each layer keeps others"


class Theirs(nn.Module):
    """A block as DeepSpeed's wrapper calls it."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x_BSH, attention_mask):
        masks = None
        if attention_mask.dtype == torch.bool:  # of BERT: keys that may be seen
            masks = AttentionMasks(padding_BT=~attention_mask[:, 0, 0], causal=False)
        else:
            assert attention_mask.shape[-2:] == x_BSH.shape[1:2] * 2
        return self.block(LayerState(x_BSH, masks=masks)).hidden


def sequence(flags, dropping=DROPPING, recompute=None):
    """The blocks of a model as they run, in float64, and the layers that drop tokens."""
    model = ModelFlags(**flags).resolve().with_vocabulary(99, 1)
    parallel = ParallelConfig(recompute_granularity=recompute)
    spec = spec_of(model, parallel)
    spec = spec if dropping is None else with_dropping(spec, dropping, model)
    torch.manual_seed(0)
    layers = [layer for layer in spec.layers(TensorParallel()) if layer.block]
    modules = [layer.build().double() for layer in layers]
    for number, param in enumerate(p for m in modules for p in m.parameters()):
        nn.init.normal_(param, std=0.2, generator=torch.Generator().manual_seed(number))
    return layer_sequence(layers, 2, modules, parallel), layers


def inputs(padded=False):
    random = torch.Generator().manual_seed(9)
    x = torch.randn(SAMPLES, LENGTH, 32, dtype=torch.float64, generator=random)
    padding = torch.arange(LENGTH)[None] >= torch.tensor([[LENGTH - 3], [LENGTH - 9]])
    return x.requires_grad_(), padding if padded else None


def grads(blocks, x, y):
    weights = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(4))
    params = [p for block in blocks for p in block.parameters()]
    return torch.autograd.grad((y * weights).sum(), [x, *params])


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("flags", [SIZES, BERT], ids=["gpt", "bert"])
def test_layers_against_deepspeed(operators, flags, recompute):
    run, _ = sequence(flags, recompute=recompute)
    x, padding = inputs(flags is BERT)
    masks = None if padding is None else AttentionMasks(padding_BT=padding, causal=False)
    ours = run(LayerState(x, masks=masks, dropout_seed=SEED)).hidden
    config = {
        "total_layer_num": LAYERS + 2, "random_ltd_layer_num": LAYERS, "global_batch_size": 1,
        "micro_batch_size": SAMPLES, "hidden_state_order": "batch_seq_dim",
        "model_type": "decoder" if padding is None else "encoder",
        "model_mask_name": "attention_mask", "layer_token_lr_schedule": {"enabled": False},
        "random_ltd_schedule": {
            "min_value": KEPT, "max_value": LENGTH, "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": 10, "seq_per_step": 1},
        },
    }  # fmt: skip
    scheduler = RandomLTDScheduler(config)
    seen = torch.zeros(1, 1, LENGTH, LENGTH)
    if padding is not None:
        seen = ~padding[:, None, None].expand(-1, 1, LENGTH, -1)
    torch.manual_seed(derive_seed(SEED, "random-ltd"))
    y = x
    for number, block in enumerate(run.blocks):
        layer = Theirs(block)
        if 1 <= number <= LAYERS:
            layer = RandomLayerTokenDrop(layer)
            layer.init_config(config, scheduler, number - 1)
        y = layer(y, attention_mask=seen)
    assert torch.allclose(ours, y, rtol=0, atol=1e-12)
    for one, other in zip(grads(run.blocks, x, ours), grads(run.blocks, x, y), strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-10)


def test_dropped_tokens_pass_with_their_gradient():
    one = TokenDropping("ltd", LAYERS + 2, (2,), KEPT, LENGTH, 10, 1)
    run, _ = sequence(LLAMA, one)
    x, _ = inputs()
    y = run.steps[2][1](LayerState(x, dropout_seed=SEED)).hidden
    kept = kept_tokens(derive_seed(SEED, "random-ltd"), 1, SAMPLES, LENGTH, KEPT, x.device)[0]
    dropped = torch.ones(SAMPLES, LENGTH, dtype=torch.bool).scatter(1, kept, False)
    assert dropped.sum() == SAMPLES * (LENGTH - KEPT)
    weights = torch.randn(y.shape, dtype=y.dtype)
    (grad,) = torch.autograd.grad((y * weights).sum(), x)
    assert torch.equal(y[dropped], x[dropped]) and torch.equal(grad[dropped], weights[dropped])
    assert not torch.isclose(y[~dropped], x[~dropped]).any(1).all()


@pytest.mark.parametrize("flags", [LLAMA, BERT | {"position_embedding_type": "rope"}])
def test_distances_are_those_of_the_text(flags):
    """A block on all tokens, of which the dropped ones are another document, is the reference."""
    one = TokenDropping("ltd", LAYERS + 2, (0,), KEPT, LENGTH, 10, 1)
    (run, _), causal = sequence(flags, one), flags is LLAMA
    x, _ = inputs()
    kept = kept_tokens(derive_seed(SEED, "random-ltd"), 1, SAMPLES, LENGTH, KEPT, x.device)[0]
    apart = torch.ones(SAMPLES, LENGTH, dtype=torch.int64).scatter(1, kept, 0)
    whole = run.blocks[0](LayerState(x, masks=AttentionMasks(apart, causal=causal))).hidden
    masks = AttentionMasks(causal=causal)
    y = run.steps[0][1](LayerState(x, masks=masks, dropout_seed=SEED)).hidden
    index = kept[..., None].expand(-1, -1, 32)
    assert torch.allclose(y.gather(1, index), whole.gather(1, index), rtol=0, atol=1e-12)


@pytest.mark.parametrize("flags", [LLAMA, BERT], ids=["llama", "bert"])
def test_at_full_length_nothing_changes(flags):
    """Nor where all tokens are gathered and put back, nor in an evaluation."""
    run, layers = sequence(flags)
    plain, _ = sequence(flags, None)
    x, padding = inputs(flags is BERT)
    masks = partial(AttentionMasks, padding_BT=padding, causal=flags is not BERT)
    expected = plain(LayerState(x, masks=masks(), dropout_seed=SEED)).hidden
    assert torch.equal(run(LayerState(x, masks=masks())).hidden, expected)
    assert not torch.equal(run(LayerState(x, masks=masks(), dropout_seed=SEED)).hidden, expected)
    begin_step(layers, 10)
    y = run(LayerState(x, masks=masks(), dropout_seed=SEED)).hidden
    assert torch.equal(y, expected)
    pairs = zip(grads(run.blocks, x, y), grads(plain.blocks, x, expected), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    all_tokens, tp = torch.arange(LENGTH).expand(SAMPLES, -1), TensorParallel()
    taken = tp.take(x, all_tokens)
    assert torch.equal(taken, x) and torch.equal(put_back(x, taken, all_tokens, tp), x)


def test_a_sample_whose_text_is_dropped():
    """It sees its padding: numbers stay finite, and other samples are as before."""
    run, _ = sequence(BERT | {"attention_backend": "eager"})
    x, _ = inputs()
    padding = torch.arange(LENGTH)[None] >= torch.tensor([[1], [LENGTH]])
    masks = AttentionMasks(padding_BT=padding, causal=False)
    kept = kept_tokens(derive_seed(SEED, "random-ltd"), LAYERS, SAMPLES, LENGTH, KEPT, x.device)
    assert not (kept[:, 0] == 0).all(1).all(), "a layer drops the only token of the text"
    y = run(LayerState(x, masks=masks, dropout_seed=SEED)).hidden
    assert y.isfinite().all() and all(g.isfinite().all() for g in grads(run.blocks, x, y))
