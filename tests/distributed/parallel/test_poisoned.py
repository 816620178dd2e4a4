"""Layouts on groups on which nothing arrives before it is waited for: the losses are those of one
process, and a wait that is left out, or a tensor that is written too early, is noticed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from poisoned_group import poisoned
from pool import RankError
from training_jobs import TINY, train, train_plainly

from megatron.parallel import collectives, linear
from megatron.parallel.mesh import Group

FLAGS = [*TINY, "--train-iters", "2", "--hidden-dropout", "0", "--attention-dropout", "0"]
LAYOUTS = {
    "tp2": "--tensor-model-parallel-size 2 --zero-stage 0",
    "tp2-sp": "--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1",
    "pp2": "--pipeline-model-parallel-size 2 --zero-stage 0",
    "dp2-zero1": "--zero-stage 1",
    "dp2-zero2": "--zero-stage 2",
    "dp2-zero3": "--zero-stage 3",
    "cp2": "--context-parallel-size 2 --zero-stage 0",
    "cp2-a2a": "--context-parallel-size 2 --cp-comm-type a2a --zero-stage 0",
}
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0 --moe-ffn-hidden-size 32"
).split()
SAMPLE = ("tp2-sp", "pp2", "dp2-zero2")


@contextmanager
def without_a_wait() -> Iterator[None]:
    """The sum of input gradients is used as it was started."""

    def start(x, group: Group) -> Callable:
        dist.all_reduce(x, group=group.handle, async_op=True)
        return lambda: x

    with mock.patch.object(linear, "start_all_reduce", start):
        yield


@contextmanager
def reused_too_early() -> Iterator[None]:
    """What is being summed over the ranks is overwritten meanwhile."""
    scatter = collectives.start_scatter

    def start(x, group: Group) -> Callable:
        finish = scatter(x, group)
        x.add_(1.0)
        return finish

    with mock.patch.object(collectives, "start_scatter", start):
        yield


MUTATIONS = {None: nullcontext, "wait": without_a_wait, "reuse": reused_too_early}


def job(argv: list[str], mutation: str | None = None) -> tuple[list[float], list[str]]:
    """Losses, and what was never waited for; for the pool."""
    with poisoned() as pending, MUTATIONS[mutation]():
        record = train(argv)
    return list(record.losses), list(pending.values())


def check(pool, flags: list[str], layout: list[str]) -> None:
    reference = train_plainly(flags)
    for losses, pending in pool.run(2, job, [*flags, *layout], timeout=300):
        np.testing.assert_allclose(losses, reference.losses, rtol=1e-5)
        assert not pending


@pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=() if x in SAMPLE else pytest.mark.proof) for x in LAYOUTS]
)
def test_nothing_is_used_before_it_arrives(pool, layout):
    check(pool, FLAGS, LAYOUTS[layout].split())


@pytest.mark.proof
@pytest.mark.parametrize("stage", ["1", "2"])
def test_experts(pool, stage):
    layout = ["--expert-model-parallel-size", "2", "--zero-stage", stage]
    check(pool, [*FLAGS, *EXPERTS], layout)


def test_a_missing_wait_is_noticed(pool):
    with pytest.raises(RankError, match="gradients are not finite"):
        pool.run(2, job, [*FLAGS, *LAYOUTS["tp2"].split()], "wait")


def test_early_reuse_is_noticed(pool):
    with pytest.raises(RankError, match="EarlyUse: reduce_scatter: what it reads"):
        pool.run(2, job, [*FLAGS, *LAYOUTS["tp2-sp"].split()], "reuse")
