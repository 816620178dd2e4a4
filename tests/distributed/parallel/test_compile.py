"""Compiled blocks that are cut over two ranks, or whose sequences are divided over them."""

import pytest
import torch
from configs import model_config
from pool import tensor_group
from torch import Tensor
from torch._dynamo.utils import counters

from megatron.model.block import Block
from megatron.model.layer_list import LayerState, initialise
from megatron.parallel.context import Context
from megatron.parallel.shard import shard_of
from megatron.parallel.tensor_parallel import TensorParallel

LENGTH, HIDDEN = 16, 32
SHAPE = {
    "num_layers": 2, "hidden_size": HIDDEN, "ffn_hidden_size": 64, "num_attention_heads": 4,
    "num_query_groups": 4, "kv_channels": 8, "seq_length": LENGTH,
    "max_position_embeddings": LENGTH, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True,
}  # fmt: skip


def job(layout: str) -> tuple[float, int]:
    """Largest relative difference from eager blocks, and graphs of two blocks."""
    group = tensor_group()
    tp = TensorParallel(group, layout == "sequence")
    if layout in ("p2p", "a2a"):
        tp = TensorParallel(context=Context(group, (layout,)))
    torch.compiler.reset()
    counters.clear()
    results = []
    for compiled in (False, True):
        blocks = [Block(model_config(**SHAPE), layer, tp, False) for layer in range(2)]
        for block in blocks:
            for name, param in block.named_parameters():
                name = shard_of(param).whole or name
                initialise(name, param, 1, tp.coordinates)
            if compiled:
                block.compile(backend="aot_eager", dynamic=False)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(2, LENGTH, HIDDEN, generator=generator)
        x = tp.own(tp.context.take(x, 1), 1)
        stream = LayerState(x.clone().requires_grad_())
        if tp.context.size > 1:
            stream = stream.changed(position_ids=tp.context.positions(LENGTH)[None])
        first = stream
        for block in blocks:
            stream = block(stream)
        stream.hidden.square().sum().backward()
        params = [p.grad for block in blocks for p in block.parameters()]
        results.append([stream.hidden.detach(), first.hidden.grad, *params])

    def difference(ours: Tensor, theirs: Tensor) -> float:
        return float((ours - theirs).abs().max() / theirs.abs().max())

    worst = max(difference(a, b) for a, b in zip(*results, strict=True))
    return worst, counters["stats"]["unique_graphs"]


@pytest.mark.proof
@pytest.mark.parametrize("layout", ["whole", "sequence", "p2p", "a2a"])
def test_two_ranks_against_eager_blocks(pool, layout):
    """Collectives break the graph of a block, which alone would be one."""
    for worst, graphs in pool.run(2, job, layout, timeout=600.0):
        assert worst < 1e-5
        assert 1 < graphs <= 20
