"""fp16 at ZeRO stage 0: the numbers of ZeRO 1, and the loss scale of DeepSpeed's own engine."""

import json

import numpy as np
import pytest
from training_jobs import TINY, train

FLAGS = [*TINY, "--fp16", "--initial-loss-scale", "4096"]
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0".split()
TP = ["--tensor-model-parallel-size", "2"]
PP = ["--num-layers", "4", "--pipeline-model-parallel-size", "2"]
SUMS = ["--accumulate-allreduce-grads-in-fp32"]
CASES = {
    "accumulated": (1, []),
    "not clipped": (1, ["--clip-grad", "0"]),
    "static scale": (1, ["--loss-scale", "1000"]),
    "sums in fp32": (1, SUMS),
    "sgd": (1, ["--optimizer", "sgd", "--sgd-momentum", "0.9"]),
    "dp2": (2, []),
    "dp2, sums in fp32": (2, SUMS),
    "dp4": (4, []),
    "tp2": (2, TP),
    "tp2-sp": (2, [*TP, "--sequence-parallel", *NO_DROPOUT]),
    "tp2-dp2, shared keys": (4, [*TP, "--num-query-groups", "1"]),
    "pp2": (2, PP),
    "pp2-dp2": (4, PP),
    "pp2-dp2, sums in fp32": (4, [*PP, *SUMS]),
    "pp2-interleaved": (2, [*PP, "--num-layers-per-virtual-pipeline-stage", "1"]),
    "pp2-dualpipev": (2, [*PP, "--pipeline-schedule", "dualpipev"]),
    "tp2-sp-pp2": (4, [*TP, "--sequence-parallel", *NO_DROPOUT, *PP]),
}


@pytest.mark.parametrize("name", CASES)
def test_against_zero_1(pool, name):
    size, flags = CASES[name]
    flags = [*FLAGS, *flags, "--train-iters", "6", "--zero-stage"]
    partitioned, whole = (pool.run(size, train, [*flags, stage])[0] for stage in ("1", "0"))
    print(name, partitioned.losses, whole.losses, partitioned.norms, whole.norms)
    assert whole.losses == partitioned.losses
    assert whole.norms == partitioned.norms
