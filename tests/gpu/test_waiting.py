"""A step is queued without making the CPU wait for the device."""

import contextlib

import pytest
import torch
from gpu_runs import DEVICE, ON_GPU, TINY, no_waiting, trainer

FORMS = {
    "fp32": [],
    "bf16": ["--bf16"],
    "bf16-fp32-sums": ["--bf16", "--accumulate-allreduce-grads-in-fp32"],
    "bf16-recomputed": ["--bf16", "--recompute-granularity", "full"],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_no_step_waits(stage, form):
    """Batch, forward, backward and update, after steps that made what is made once."""
    if stage == 0 and form == "bf16-fp32-sums":
        form = "bf16"  # at stage 0 sums are in float32 anyway
    with trainer([*TINY, *FORMS[form], "--zero-stage", str(stage)]) as built:
        assert built.data.datasets.train is not None
        batches = built.data.batches(built.data.datasets.train, **built.reading())
        with contextlib.closing(batches):
            for step in range(6):
                with no_waiting() if step > 2 else contextlib.nullcontext():
                    result = built.engine.train_step(batches, 2, 4 * step, 1e-3, 0.1)
            numbers = (result.loss, result.grad_norm, result.skipped)
            assert all(torch.is_tensor(each) and each.device == DEVICE for each in numbers)
            assert float(result.grad_norm) > 0 and not bool(result.skipped)


@pytest.mark.skipif(not ON_GPU, reason="only a GPU has this")
def test_waiting_would_be_noticed():
    value = torch.ones((), device=DEVICE)
    with no_waiting(), pytest.raises(RuntimeError, match="synchron"):
        float(value)
