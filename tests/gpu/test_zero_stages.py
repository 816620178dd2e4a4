"""Training at every ZeRO stage on a GPU, against float64 on the CPU and the stages themselves."""

import json

import numpy as np
import pytest
import torch
from gpu_runs import TINY, train

from megatron.apps.parity.runs import PlainTraining, RunRecord

KINDS = {"fp32": [], "bf16": ["--bf16"]}
LOSSES = {"fp32": 1e-3, "bf16": 2e-2}
"""Largest relative error of a loss: Adam's first steps are the signs of gradients, and some of
those are near zero."""
NORMS = {"fp32": 2e-3, "bf16": 5e-2}
"""Of the first gradient norm."""


@pytest.fixture(scope="module")
def in_float64() -> RunRecord:
    """The same training in plain torch on the CPU."""
    return PlainTraining(TINY, dtype=torch.float64).run()


def check(record: RunRecord, reference: RunRecord, form: str) -> None:
    np.testing.assert_allclose(record.losses, reference.losses, rtol=LOSSES[form])
    np.testing.assert_allclose(record.norms[0], reference.norms[0], rtol=NORMS[form])
    assert not any(record.skipped)
    assert record.losses[-1] < record.losses[0] - 0.3, "the run must learn something"


@pytest.mark.parametrize("form", KINDS)
@pytest.mark.parametrize("stage", range(4))
def test_against_float64_on_the_cpu(in_float64, stage, form):
    check(train([*TINY, *KINDS[form], "--zero-stage", str(stage)]), in_float64, form)


@pytest.mark.parametrize("form", KINDS)
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeeds_own_stage_against_float64_on_the_cpu(in_float64, stage, form):
    """With folders in DeepSpeed's format one rank runs the stage asked for: at 2 gradients are
    reduced in hooks, at 3 parameters are gathered ahead of their use."""
    argv = [*TINY, *KINDS[form], "--zero-stage", str(stage), "--checkpoint-format", "deepspeed"]
    check(train(argv), in_float64, form)


@pytest.mark.parametrize("prefetched", [0, 50_000, 50_000_000])
def test_nothing_is_used_before_it_is_gathered(in_float64, tmp_path, prefetched):
    """Stage 3 with little, some and all gathered ahead, on a stream of its own."""
    path = tmp_path / "ds.json"
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "overlap_comm": True}
    zero["stage3_prefetch_bucket_size"] = prefetched
    zero["stage3_max_reuse_distance"] = 0 if prefetched < 1e6 else 10**9
    path.write_text(json.dumps({"zero_optimization": zero}))
    argv = [*TINY, "--deepspeed_config", str(path), "--checkpoint-format", "deepspeed"]
    check(train(argv), in_float64, "fp32")


def test_sums_of_gradients_in_float32(in_float64):
    flags = ["--bf16", "--zero-stage", "1", "--accumulate-allreduce-grads-in-fp32"]
    check(train([*TINY, *flags]), in_float64, "bf16")


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_fp16_follows(in_float64, stage):
    flags = ["--fp16", "--initial-loss-scale", "4096", "--zero-stage", str(stage)]
    check(train([*TINY, *flags]), in_float64, "bf16")


def test_stages_agree_with_each_other():
    """One rank runs 2 and 3 as 1. Between 0 and 1 only the order of sums differs."""
    whole, *others = (train([*TINY, "--zero-stage", str(stage)]) for stage in range(4))
    for other in others:
        assert other.losses == others[0].losses
        assert other.norms == others[0].norms
        for name, values in others[0].state.items():
            np.testing.assert_array_equal(other.state[name], values, err_msg=name)
    np.testing.assert_allclose(whole.losses, others[0].losses, rtol=1e-4)
