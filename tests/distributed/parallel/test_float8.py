"""8-bit products of layers that are cut over two ranks, against one process; and whole runs."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from configs import model_config
from pool import tensor_group
from samples import sampled
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from training_jobs import TINY, train

from megatron.apps.parity.runs import watched_trainer
from megatron.engine.environment import distributed
from megatron.features.float8.linear import Float8
from megatron.model.block import Block
from megatron.model.layer_list import LayerState, initialise
from megatron.parallel.layers import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from megatron.parallel.shard import shard_of
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.run.run import parse_run

BATCH, LENGTH, HIDDEN = 2, 16, 64
SHAPE = {
    "num_layers": 1, "hidden_size": HIDDEN, "ffn_hidden_size": 128, "num_attention_heads": 4,
    "kv_channels": 16, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    "position_embedding_type": "rope", "swiglu": True, "normalization": "RMSNorm",
    "init_method_std": 0.2, "seq_length": LENGTH, "max_position_embeddings": LENGTH,
}  # fmt: skip


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def outcome(tp: TensorParallel, kv_heads: int, float8: Float8 | None) -> dict[str, Tensor]:
    """Output, input gradient and weight gradients of a block, joined from all ranks, float32."""
    group = tp.group
    block = Block(model_config(**SHAPE, num_query_groups=kv_heads), 0, tp, False)
    for name, param in block.named_parameters():
        initialise(shard_of(param).whole or name, param, 1, tp.coordinates)
    block = block.bfloat16()
    for module in block.modules():
        if isinstance(module, ColumnParallelLinear | QKVParallelLinear | RowParallelLinear):
            module.kernel = float8
    x = tp.own(draw(BATCH, LENGTH, HIDDEN, seed=1), 1).clone().requires_grad_()
    y = block(LayerState(x)).hidden
    y.backward(tp.own(draw(BATCH, LENGTH, HIDDEN, seed=2), 1))

    def everywhere(value: Tensor) -> list[Tensor]:
        found = [torch.empty_like(value).contiguous() for _ in range(group.size)]
        if group.size == 1:
            return [value.float()]
        dist.all_gather(found, value.contiguous(), group=group.handle)
        return [each.float() for each in found]

    found = {}
    for name, value in (("output", y.detach()), ("input", x.grad)):
        parts = everywhere(value)
        found[name] = torch.cat(parts, 1) if tp.split else parts[0]
    for name, param in block.named_parameters():
        if not shard_of(param).part:
            found[name] = shard_of(param).join(everywhere(param.grad), {"tensor": group.size})
    return found


def job(sequence: bool, kv_heads: int, recipe: str) -> dict[str, tuple[float, float]]:
    """Relative errors of 8 bits, on two ranks and on one, against one process in bfloat16."""
    tp = TensorParallel(tensor_group(), sequence)
    found = outcome(tp, kv_heads, Float8(True, recipe))
    alone = outcome(TensorParallel(), kv_heads, Float8(True, recipe))
    plain = outcome(TensorParallel(), kv_heads, None)

    def error(name: str, ours: dict[str, Tensor]) -> float:
        return float((ours[name] - plain[name]).norm() / plain[name].norm())

    return {name: (error(name, found), error(name, alone)) for name in found if name in plain}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_two_ranks_are_as_near_to_bf16_as_one(pool, sequence, kv_heads, recipe):
    """Each rank scales its own share of a tensor, so that two do not give what one gives. Errors
    add up over a block whose weights are ten times as wide as usual."""
    for name, (two, one) in pool.run(2, job, sequence, kv_heads, recipe)[0].items():
        assert two < 0.25 and two < 1.2 * one + 0.01, (name, two, one)


FLAGS = [*TINY, "--bf16", "--train-iters", "4", "--attention-dropout", "0", "--hidden-dropout", "0"]
FP8 = ["--fp8-format", "hybrid"]
DELAYED = [*FP8, "--fp8-recipe", "delayed"]


class Casts(TorchDispatchMode):
    """Counts casts of matrices to 8 bits that are not of a micro batch's 16 tokens."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and found.dtype in FLOAT8:
            self.count += found.shape[0] != 16
        return found


FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def casts_of_weights(flags: list[str]) -> list[int]:
    """In each step of a run."""
    counts: list[int] = []
    run = parse_run(None, flags)
    with distributed(run.config.parallel) as mesh, Casts() as casts:
        trainer = watched_trainer(run, mesh, lambda result: counts.append(casts.count))
        trainer.fit()
    return [after - before for before, after in pairwise([0, *counts])]


@pytest.mark.parametrize(
    ("flags", "ranks", "count"),
    sampled(
        [("--zero-stage 0", 1, 8), ("--zero-stage 1", 1, 8), ("--zero-stage 2", 2, 8),
         ("--zero-stage 3", 2, 32)],
        lambda case: case[0][-1] in "03",
    ),
)  # fmt: skip
def test_weights_are_cast_once_for_each_update(pool, flags, ranks, count):
    """Two blocks of four, for four micro batches of all ranks; at stage 3, where each weight is
    gathered when it is used, for each of a rank's two, forward and backward."""
    found = pool.run(ranks, casts_of_weights, [*FLAGS, *FP8, *flags.split()])[0]
    assert found == [count] * 4


@pytest.mark.proof
def test_zero_stages_agree_and_follow_bf16(pool):
    """At stage 3 weights are freed after the forward pass and gathered for the backward pass."""
    plain, *stages = [
        pool.run(2, train, [*FLAGS, "--zero-stage", str(stage), *more])[0]
        for stage, more in ((1, []), (1, FP8), (2, FP8), (3, FP8))
    ]
    first = stages[0]
    assert first.losses != plain.losses
    assert first.losses == pytest.approx(plain.losses, rel=1e-2)
    for record in stages[1:]:
        assert record.losses == pytest.approx(first.losses, rel=2e-3)
        assert record.norms == pytest.approx(first.norms, rel=2e-2)


LAYOUTS = {
    "tp2-sp-dp2": "--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1",
    "tp2-dp2-zero3-full": "--tensor-model-parallel-size 2 --zero-stage 3 "
    "--recompute-granularity full",
    "pp2-dp2": "--pipeline-model-parallel-size 2 --zero-stage 1",
    "autocast": "--zero-stage 0",
}


@pytest.mark.proof
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_follow_bf16(pool, layout):
    flags = [*FLAGS, *LAYOUTS[layout].split()]
    plain, found, delayed = (pool.run(4, train, [*flags, *m])[0] for m in ([], FP8, DELAYED))
    assert delayed.losses[0] == found.losses[0]
    assert delayed.losses != found.losses
    assert delayed.losses == pytest.approx(plain.losses, rel=2e-2)
    assert found.losses != plain.losses and found.losses == pytest.approx(plain.losses, rel=1e-2)
    assert found.norms[0] == pytest.approx(plain.norms[0], rel=5e-2)
