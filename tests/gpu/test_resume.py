"""A run that is saved and continued on a GPU has the bits of one that was not stopped."""

import numpy as np
import pytest
from gpu_runs import TINY, train

DROPOUT = ["--attention-dropout", "0.1", "--hidden-dropout", "0.1"]
RUNS = {
    "zero0": ["--zero-stage", "0", *DROPOUT],
    "zero0-fp16": ["--fp16", "--initial-loss-scale", "4096", "--zero-stage", "0"],
    "zero1-bf16": ["--bf16", "--zero-stage", "1", *DROPOUT],
    "zero1-bf16-async": ["--bf16", "--zero-stage", "1", "--async-save"],
    "zero1-bf16-fp32-sums": ["--bf16", "--zero-stage", "1", "--accumulate-allreduce-grads-in-fp32"],
    "zero2-fp16": ["--fp16", "--initial-loss-scale", "4096", "--zero-stage", "2"],
    "zero3-deepspeed": ["--bf16", "--zero-stage", "3", "--checkpoint-format", "deepspeed"],
}


@pytest.mark.parametrize("name", RUNS)
def test_resume_is_bitwise(tmp_path, name):
    argv = [*TINY, *RUNS[name], "--deterministic-mode"]
    saving = ["--save-interval", "3", "--save"]
    whole = train([*argv, *saving, str(tmp_path / "whole")])
    first = train([*argv, *saving, str(tmp_path / "half"), "--exit-interval", "3"])
    assert first.losses == whole.losses[:3]
    load = ["--load", str(tmp_path / "half")]
    second = train([*argv, *saving, str(tmp_path / "rest"), *load])
    assert second.losses == whole.losses[3:]
    assert second.norms == whole.norms[3:]
    assert second.scales == whole.scales[3:]
    assert second.state.keys() == whole.state.keys()
    for key, values in whole.state.items():
        np.testing.assert_array_equal(second.state[key], values, err_msg=key)


def test_a_run_of_the_gpu_continues_at_another_stage(tmp_path):
    """What is saved holds float32 weights and moments whatever the stage."""
    argv = [*TINY, "--save", str(tmp_path), "--save-interval", "3", "--exit-interval", "3"]
    train([*argv, "--zero-stage", "1"])
    whole = train([*TINY, "--zero-stage", "1"])
    found = train([*TINY, "--zero-stage", "0", "--load", str(tmp_path)])
    np.testing.assert_allclose(found.losses, whole.losses[3:], rtol=1e-4)
