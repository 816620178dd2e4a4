"""Compiled blocks that are cut over two ranks, or whose sequences are divided over them."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from configs import model_config
from pool import tensor_group
from samples import sampled
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.model.block import Block
from megatron.model.layer_list import LayerState, initialise
from megatron.parallel.context import Context
from megatron.parallel.mesh import Group
from megatron.parallel.shard import shard_of
from megatron.parallel.tensor_parallel import TensorParallel

BATCH, LENGTH, HIDDEN = 2, 16, 32
SHAPE = {
    "num_layers": 2, "hidden_size": HIDDEN, "ffn_hidden_size": 96, "num_attention_heads": 4,
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


def graphs_of(layout: str) -> tuple[int, dict[str, int], list[str], list[tuple[int, ...]]]:
    """Graphs of two blocks of the first of two ranks, what broke them, the collectives and products
    of the backward pass in order, and the shapes that it is given; for the pool."""
    # Nothing is sent, so that one process is enough.
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    group, order, shapes = Group((0, 1), 0, dist.group.WORLD), [], []

    def backward(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        order[:] = [name.split(".")[1] for name in names if "c10d" in name or ".mm." in name]
        shapes[:] = [tuple(x.shape) for x in inputs if isinstance(x, Tensor)]
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        bw_compiler=backward,
        partition_fn=min_cut_rematerialization_partition,
    )
    tp = TensorParallel(group, layout == "sequence")
    if layout == "a2a":
        tp = TensorParallel(context=Context(group, (layout,)))
    torch.compiler.reset()
    counters.clear()
    blocks = [Block(model_config(**SHAPE), layer, tp, False) for layer in range(2)]
    length = LENGTH // tp.slices // tp.context.size
    stream = LayerState(torch.zeros(BATCH, length, HIDDEN, requires_grad=True))
    if tp.context.size > 1:
        stream = stream.changed(position_ids=tp.context.positions(LENGTH)[None])
    for block in blocks:
        block.compile(backend=backend, dynamic=False)
        stream = block(stream)
    stream.hidden.sum().backward()
    breaks = dict(counters["graph_break"])
    return counters["stats"]["unique_graphs"], breaks, order, shapes


@pytest.mark.parametrize(
    "layout", sampled(["whole", "sequence", "a2a"], {"sequence", "a2a"}.__contains__)
)
def test_a_block_with_collectives_is_one_graph(pool, layout):
    """In its backward pass they run next to products that do not wait for them."""
    ((graphs, breaks, order, shapes),) = pool.run(1, graphs_of, layout)
    assert (graphs, breaks) == (1, {})
    if layout == "a2a":
        return
    # Of each entering layer: the gradient of its input is on its way while that of its weight is
    # computed.
    sums = "reduce_scatter_tensor" if layout == "sequence" else "all_reduce"
    started = [place for place, name in enumerate(order) if name == sums]
    assert len(started) == 2
    for place in started:
        rest = order[place + 1 :]
        assert "mm" in rest[: len(rest) - rest[::-1].index("wait_tensor")]
        assert rest[: rest.index("mm")].count("wait_tensor") == (layout == "sequence")
    if layout == "sequence":
        gathered = [place for place, name in enumerate(order) if name == "all_gather_into_tensor"]
        # Two of gradients that enter, and two of inputs, which begin before a product.
        assert len(gathered) == 4
        assert sum(order[place + 1] == "mm" for place in gathered) == 2
        # What is kept of an input is a slice of the sequence.
        whole = (BATCH * LENGTH, HIDDEN)
        assert whole not in shapes and (BATCH, LENGTH, HIDDEN) not in shapes


@pytest.mark.proof
@pytest.mark.parametrize("layout", ["whole", "sequence", "p2p", "a2a"])
def test_two_ranks_against_eager_blocks(pool, layout):
    """Attention in rings, whose kernels and collectives have an order of their own, stands between
    two graphs of each function that leads to it: the block's and two of the attention."""
    for worst, graphs in pool.run(2, job, layout, timeout=600.0):
        assert worst < 1e-5
        assert graphs == (6 if layout == "p2p" else 1)
