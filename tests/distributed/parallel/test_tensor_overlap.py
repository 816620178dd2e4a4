"""Collectives that torch's compiler joins with products: found in our graphs, with the same
results by its operators' plain forms."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from configs import model_config
from pool import tensor_group
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.distributed import _symmetric_memory as symmetric
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.model.block import Block
from megatron.model.layer_list import LayerState, initialise
from megatron.parallel.collectives import Graphs
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
JOINED = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
LEFT = ("all_gather_into_tensor", "reduce_scatter_tensor")


def joined(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph after Inductor's pass."""
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    graph = copy.deepcopy(graph)
    view_to_reshape(graph)
    micro_pipeline_tp_pass(graph.graph)
    graph.recompile()
    return graph


@contextmanager
def joining(seen: list[Counter]) -> Iterator[Callable]:
    """Yields a compiler's backend that runs graphs operator by operator after that pass; ``seen``
    gets the joined operators of each, and the collectives that are left."""
    from torch._inductor.decomposition import select_decomp_table

    def compiler(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable:
        graph = joined(graph)
        names = [str(node.target).split(".")[1] for node in graph.graph.nodes
                 if isinstance(node.target, torch._ops.OpOverload)]  # fmt: skip
        seen.append(Counter(name for name in names if name in (*JOINED, *LEFT)))
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl(JOINED[0], symmetric._fused_all_gather_matmul_fallback, "CPU")
    library.impl(JOINED[1], symmetric._fused_matmul_reduce_scatter_fallback, "CPU")
    with (
        symmetric._test_mode(),
        mock.patch.object(dist, "is_nccl_available", lambda: True),
        mock.patch.object(Graphs, "for_products", True),
    ):
        yield aot_autograd(
            fw_compiler=compiler,
            bw_compiler=compiler,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )
    library._destroy()


def graphs_of(bias: bool, batch: int) -> list[Counter]:
    """Operators of the forward and the backward pass of a block, as the first of two ranks."""
    # Nothing is sent, so that one process is enough.
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    tp, seen = TensorParallel(Group((0, 1), 0, dist.group.WORLD), True), []
    with joining(seen) as backend:
        block = Block(model_config(**SHAPE, add_bias_linear=bias), 0, tp, False)
        block.compile(backend=backend, dynamic=False)
        x = torch.zeros(batch, LENGTH // 2, HIDDEN, requires_grad=True)
        block(LayerState(x)).hidden.sum().backward()
    return seen


@pytest.mark.parametrize(
    "bias, batch", [(True, 2), *(pytest.param(*x, marks=pytest.mark.proof) for x in ((False, 1),))]
)
def test_the_compiler_finds_products(pool, bias, batch):
    """In the forward pass both products that follow a gather and both before a scatter; in the
    backward pass as many. What is left gathers inputs for weights' gradients."""
    ((forward, backward),) = pool.run(1, graphs_of, bias, batch)
    assert forward == {JOINED[0]: 2, JOINED[1]: 2}
    assert backward == {JOINED[0]: 2, JOINED[1]: 2, LEFT[0]: 2}


def results(bias: bool, tp: TensorParallel, backend: Callable | None = None) -> list[np.ndarray]:
    """Output and gradients of two blocks."""
    blocks = [Block(model_config(**SHAPE, add_bias_linear=bias), n, tp, False) for n in range(2)]
    for block in blocks:
        for name, param in block.named_parameters():
            initialise(shard_of(param).whole or name, param, 1, tp.coordinates)
        if backend is not None:
            block.compile(backend=backend, dynamic=False)
    x = torch.randn(BATCH, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(1))
    first = state = LayerState(tp.own(x, 1).clone().requires_grad_())
    for block in blocks:
        state = block(state)
    state.hidden.square().sum().backward()
    grads = [param.grad for block in blocks for param in block.parameters()]
    return [x.numpy() for x in (state.hidden.detach(), first.hidden.grad, *grads)]


def both(bias: bool) -> tuple[list[np.ndarray], list[np.ndarray], list[Counter]]:
    """Results of eager blocks, those with joined products, and what was joined; for the pool."""
    tp, seen = TensorParallel(tensor_group(), True), list[Counter]()
    eager = results(bias, tp)
    with joining(seen) as backend:
        return eager, results(bias, tp, backend), seen


@pytest.mark.proof
@pytest.mark.parametrize("bias", [False, True])
def test_joined_products_against_eager_blocks(pool, bias):
    for eager, others, seen in pool.run(2, both, bias, timeout=300.0):
        assert all(count[JOINED[0]] == count[JOINED[1]] == 2 for count in seen) and seen
        for ours, theirs in zip(others, eager, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max())
