"""Runs in which ranks divide sequences train as plain torch does, at every ZeRO stage and in every
precision."""

import json

import numpy as np
import pytest
from against_one_process import check_training, within
from training_jobs import TINY, train, train_plainly

from megatron.apps.parity.layouts import flags_for, parse_layout
from megatron.apps.parity.runs import NUDGES, Drift, nudged, rounding_noise

LLAMA = (
    "--num-layers 4 --swiglu --position-embedding-type rope --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --num-query-groups 2"
).split()
FLAGS = [*TINY, *LLAMA, "--global-batch-size", "8", "--lr-decay-style", "cosine"]
DROPOUT = {
    "hidden": ["--attention-dropout", "0"],
    "none": ["--attention-dropout", "0", "--hidden-dropout", "0"],
}


def training(dropout, steps):
    return [*FLAGS, *DROPOUT[dropout], "--train-iters", str(steps)]


LAYOUTS = [
    *(f"cp2-{kind}zero{stage}" for kind in ("", "a2a-") for stage in range(4)),
    *(f"cp2-dp2-allgather-zero{stage}" for stage in range(4)),
    *(f"cp4-a2a+p2p-zero{stage}" for stage in range(4)),
    *("cp2-tp2-zero3", "cp2-tp2-sp-zero2", "cp2-a2a-tp2-sp-zero1"),
    *("cp2-pp2-zero0", "cp2-a2a-pp2-interleaved-zero1", "cp2-pp2-dualpipev-zero1"),
]


@pytest.mark.proof
@pytest.mark.parametrize("layout", LAYOUTS)
def test_float32_as_plain_torch(pool, layout):
    """Hidden dropout is on where masks equal those of one process."""
    parsed = parse_layout(layout)
    check_training(pool, parsed.processes, training(parsed.dropout, 12), flags_for(parsed))


def test_noise_counts_how_weights_are_rounded():
    """A last bit of the weights drives these trainings further apart than other orders of sums."""
    argv = training("hidden", 3)
    alone = train_plainly(argv)
    noise = rounding_noise(argv, alone)
    moved = Drift.between([nudged(argv, seed).run() for seed in range(NUDGES)], alone)
    assert within(moved, noise)


HALVES = [
    *(f"cp2-zero{stage}-{half}" for stage in range(4) for half in ("bf16", "fp16")),
    *("cp2-a2a-tp2-sp-zero3-bf16", "cp2-allgather-pp2-zero1-fp16", "cp4-a2a+p2p-zero2-fp16"),
]


@pytest.mark.proof
@pytest.mark.parametrize("layout", HALVES)
def test_half_precision_follows_float32(pool, layout):
    parsed = parse_layout(layout)
    flags = training(parsed.dropout, 4)
    reference = train_plainly(flags)
    scale = ["--initial-loss-scale", "4096"]
    record = pool.run(parsed.processes, train, [*flags, *flags_for(parsed), *scale], timeout=300)[0]
    assert not any(record.skipped)
    np.testing.assert_allclose(record.losses, reference.losses, rtol=3e-3)
    assert record.norms[0] == pytest.approx(reference.norms[0], rel=5e-3)
    assert record.losses != reference.losses, "half precision must round"


@pytest.mark.proof
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offloaded_states(pool, stage, tmp_path):
    """With DeepSpeed's key of the same meaning, whose default is a2a."""
    path, zero = tmp_path / "ds.json", {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    path.write_text(json.dumps({"zero_optimization": zero, "sequence_parallel_size": 2}))
    check_training(pool, 2, training("hidden", 12), ["--deepspeed_config", str(path)])
