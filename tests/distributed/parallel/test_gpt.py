"""A whole GPT cut over 2 and 4 ranks against one process, float64: loss and every gradient."""

import pytest
import torch
import torch.distributed as dist
from pool import tensor_group
from torch import Tensor

from megatron.config import ModelConfig, ParallelConfig, RunConfig
from megatron.model.gpt import build_gpt, gpt_loss
from megatron.model.layer_list import initialise
from megatron.parallel.groups import SINGLE, Group
from megatron.parallel.shard import Init, shard_of

VOCAB, BATCH, LENGTH = 50, 3, 16

GPT2: dict = {}
LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
MODELS = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "gpt2-untied": {"untie_embeddings_and_output_weights": True},
    "gpt2-erf": {"bias_gelu_fusion": False},
    "gpt2-squared-relu": {"squared_relu": True},
    "llama-tied": LLAMA | {"untie_embeddings_and_output_weights": False},
    "llama-half-rotary-qkv-bias": LLAMA | {"rotary_percent": 0.5, "add_qkv_bias": True},
}


def config(size: int, changes: dict) -> RunConfig:
    shape = {
        "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 8,
        "num_query_groups": 8, "kv_channels": 4, "seq_length": LENGTH,
        "max_position_embeddings": LENGTH, "make_vocab_size_divisible_by": 8,
        "attention_dropout": 0.0, "hidden_dropout": 0.0, "attention_backend": "eager",
    }  # fmt: skip
    parallel = ParallelConfig(tensor_model_parallel_size=size)
    run = RunConfig(model=ModelConfig(**(shape | changes)), parallel=parallel)
    return run.with_vocabulary(VOCAB)


def loss_and_gradients(
    group: Group, changes: dict, recompute: str | None
) -> tuple[float, dict[str, Tensor]]:
    run = config(group.size, changes)
    parallel = ParallelConfig(
        recompute_granularity=recompute,
        recompute_method="uniform" if recompute == "full" else None,
    )
    model = build_gpt(run.model, parallel, group).double()
    for name, param in model.canonical_parameters():
        # Wider than at the start of a training, biases too, so that every gradient is large.
        param.init = Init(std=0.3)
        initialise(name, param, 1234, group.rank, group.size)
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=draw)
    mask = (torch.rand(BATCH, LENGTH, generator=draw) < 0.8).double()
    loss = gpt_loss(model(tokens[:, :-1]), tokens[:, 1:], mask, VOCAB, group)
    loss.backward()
    gradients = {}
    for name, param in model.canonical_parameters():
        shares = [param.grad]
        if group.size > 1:
            shares = [torch.empty_like(param.grad) for _ in range(group.size)]
            dist.all_gather(shares, param.grad, group=group.handle)
        if shard_of(param).dim is None:
            # Every rank holds this parameter, and must find the same gradient for it.
            assert all(torch.allclose(share, shares[0], rtol=1e-13, atol=0) for share in shares)
        gradients[name] = shard_of(param).join(shares).clone()
    return loss.item(), gradients


def on_ranks(changes: dict, recompute: str | None) -> tuple[float, dict[str, Tensor]]:
    return loss_and_gradients(tensor_group(), changes, recompute)


CASES = [
    (name, size, groups, recompute)
    for name in MODELS
    for size, groups, recompute in [(2, 8, None), (4, 4, None)]
] + [("gpt2", 2, 2, None), ("llama", 2, 2, "full"), ("llama", 4, 4, "selective")]


@pytest.mark.parametrize(
    "name, size, groups, recompute",
    CASES,
    ids=[f"{n}-tensor{s}-groups{g}" + (f"-{r}" if r else "") for n, s, g, r in CASES],
)
def test_against_one_process(pool, name, size, groups, recompute):
    changes = MODELS[name] | {"num_query_groups": groups}
    loss, expected = loss_and_gradients(SINGLE, changes, None)
    largest = max(float(grad.abs().max()) for grad in expected.values())
    for rank_loss, found in pool.run(size, on_ranks, changes, recompute):
        assert abs(rank_loss - loss) <= 1e-12 * loss
        assert list(found) == list(expected)
        for key, grad in expected.items():
            bound = 1e-12 * max(float(grad.abs().max()), 1e-3 * largest)
            assert float((found[key] - grad).abs().max()) <= bound, key
