"""Products of linear layers added to the sums of a step, in whole runs: the bits of autograd's sums
on a CPU, where a product is rounded before the sum as autograd does it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from samples import sampled
from training_jobs import TINY, train

from megatron.kernels import sums
from megatron.kernels.switches import switched

FLAGS = [*TINY, "--global-batch-size", "8", "--train-iters", "3", "--num-layers", "4"]
LLAMA = (
    "--swiglu --use-rotary-position-embeddings --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --num-query-groups 2"
).split()
TP, PP = (["--tensor-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "2"])
SUMS = ["--bf16", "--accumulate-allreduce-grads-in-fp32", "--zero-stage", "1"]
LATER = [*PP, "--pipeline-schedule", "zbh1"]
CASES: dict[str, tuple[int, list[str]]] = {
    "zero0": (1, ["--zero-stage", "0"]),
    "zero0-bf16": (2, ["--zero-stage", "0", "--bf16", *LLAMA]),
    "zero1-bf16": (1, ["--zero-stage", "1", "--bf16"]),
    "zero1-bf16-data": (2, ["--zero-stage", "1", "--bf16", *LLAMA]),
    "zero2-bf16-data": (2, ["--zero-stage", "2", "--bf16"]),
    "fp32-sums": (1, SUMS),
    "fp32-sums-data": (2, [*SUMS, *LLAMA]),
    "fp16": (1, "--fp16 --initial-loss-scale 4096 --zero-stage 0".split()),
    "fp16-zero1": (1, "--fp16 --initial-loss-scale 4096 --zero-stage 1".split()),
    "tensor": (2, [*TP, "--sequence-parallel"]),
    "copies": (2, [*TP, *LLAMA, "--num-query-groups", "1"]),
    "pipeline": (2, [*PP, "--bf16"]),
    "pipeline-sums": (2, [*PP, *SUMS]),
    "later": (2, LATER),
    "later-sums": (2, [*LATER, *SUMS]),
    "later-data": (4, [*LATER, "--zero-stage", "1", "--bf16"]),
    "full": (1, "--recompute-granularity full --bf16".split()),
    "mlp-act": (1, ["--recompute-modules", "mlp_act", *LLAMA]),
    "lora": (1, ["--lora", "--lora-rank", "4"]),
    "experts": (1, "--num-experts 4 --moe-router-topk 2 --bf16".split()),
    "t5": (1, ["--model-family", "t5"]),
    "noise-scale": (1, ["--gradient-noise-interval", "2"]),
}


def in_gemms(argv: list[str]) -> Any:
    """A run with products of linear layers in sums, and how many there were; for the pool."""
    add, count = sums.GradientSum.add_product, 0

    def counted(*args: Any) -> None:
        nonlocal count
        count += 1
        add(*args)

    with (
        mock.patch.object(sums, "PRODUCTS_ON", {"cpu"}),
        mock.patch.object(sums.GradientSum, "add_product", counted),
    ):
        return train(argv), count


def by_autograd(argv: list[str]) -> Any:
    """A run without any sums; for the pool."""
    with switched(sums=False):
        return train(argv)


@pytest.mark.parametrize("case", sampled(CASES, {"later-sums", "zero1-bf16-data"}.__contains__))
def test_bits_of_autograd(pool, case):
    ranks, flags = CASES[case]
    argv = [*FLAGS, *flags]
    ours, plain = pool.run(ranks, in_gemms, argv), pool.run(ranks, by_autograd, argv)
    for (one, count), other in zip(ours, plain, strict=True):
        assert one.state.keys() == other.state.keys() and len(one.state) > 4
        names = [name for name, values in one.state.items() if (values != other.state[name]).any()]
        assert names == []
        assert (one.losses, one.norms, one.skipped) == (other.losses, other.norms, other.skipped)
        assert (count > 0) == (case not in ("zero2-bf16-data", "lora"))
