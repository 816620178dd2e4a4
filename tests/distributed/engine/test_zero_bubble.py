"""Schedules that compute gradients of weights later: losses, gradient norms, weights and moments of
whole runs are those of the schedule with whole backward passes, bit by bit."""

import pytest
from samples import sampled
from training_jobs import TINY, train

FLAGS = [*TINY, "--global-batch-size", "8", "--train-iters", "3", "--num-layers", "4"]
LLAMA = (
    "--swiglu --use-rotary-position-embeddings --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --num-query-groups 2"
).split()
TP = "--tensor-model-parallel-size 2".split()
SP = [*TP, "--sequence-parallel"]
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01".split()
FP16 = "--fp16 --initial-loss-scale 65536 --zero-stage".split()
SUMS = ["--accumulate-allreduce-grads-in-fp32"]
FULL = "--recompute-granularity full --recompute-method uniform".split()
FP8 = "--bf16 --fp8-format hybrid --fp8-recipe delayed".split()
CASES = {
    "plain": (2, []),
    "data": (4, ["--zero-stage", "1"]),
    "bf16-zero0": (2, ["--bf16", "--zero-stage", "0"]),
    "bf16-zero1": (4, ["--bf16", "--zero-stage", "1"]),
    "bf16-zero1-fp32": (4, ["--bf16", "--zero-stage", "1", *SUMS]),
    "fp16-zero0": (2, [*FP16, "0"]),
    "fp16-zero1": (4, [*FP16, "1"]),
    "fp16-zero1-fp32": (2, [*FP16, "1", *SUMS]),
    "tensor": (4, TP),
    "sequence": (4, [*SP, *LLAMA]),
    "copies": (4, [*SP, "--num-query-groups", "1"]),
    "full": (2, FULL),
    "selective": (2, ["--recompute-activations", *LLAMA]),
    "context": (4, ["--context-parallel-size", "2", "--attention-dropout", "0"]),
    "tiles": (2, ["--mlp-chunks-for-training", "2"]),
    "experts": (2, EXPERTS),
    "experts-apart": (4, [*EXPERTS, "--expert-model-parallel-size", "2"]),
    "experts-full": (2, [*EXPERTS, *FULL]),
    "experts-tensor": (4, [*EXPERTS, *TP]),
    "experts-whole": (4, [*EXPERTS, *TP, "--expert-tensor-parallel-size", "1"]),
    "float8": (2, FP8),
    "float8-sequence": (4, [*FP8, *SP]),
    "t5": (2, ["--model-family", "t5"]),
    "bert": (2, ["--model-family", "bert"]),
    "lora": (2, ["--lora", "--lora-rank", "4"]),
}
WHOLE = {"zbh1": "1f1b", "dualpipev_zb": "dualpipev"}


def differences(one, other):
    """Names of what is not the same bit by bit in two records of a rank."""
    assert one.state.keys() == other.state.keys() and len(one.state) > 10
    names = [name for name, values in one.state.items() if (values != other.state[name]).any()]
    return names + [
        n for n in ("losses", "norms", "skipped") if getattr(one, n) != getattr(other, n)
    ]


@pytest.mark.parametrize("schedule", WHOLE)
@pytest.mark.parametrize("case", sampled(CASES, "experts".__eq__))
def test_bits_of_whole_backward_passes(pool, case, schedule):
    ranks, flags = CASES[case]
    argv = [*FLAGS, *flags, *"--pipeline-model-parallel-size 2 --pipeline-schedule".split()]
    whole = pool.run(ranks, train, [*argv, WHOLE[schedule]])
    apart = pool.run(ranks, train, [*argv, schedule])
    assert [differences(one, other) for one, other in zip(whole, apart, strict=True)] == [
        []
    ] * ranks


@pytest.mark.parametrize("batch", [2, 4, 6])
@pytest.mark.proof
def test_bits_on_four_ranks(pool, batch):
    """With fewer micro batches than ranks, as many, and more."""
    argv = [*FLAGS, "--global-batch-size", str(batch), "--pipeline-model-parallel-size", "4"]
    whole = pool.run(4, train, argv)
    apart = pool.run(4, train, [*argv, "--pipeline-schedule", "zbh1"])
    assert list(map(differences, whole, apart)) == [[]] * 4
