"""Optimizer state and parameters in the CPU's memory, computed with on a GPU."""

import json

import numpy as np
import pytest
from gpu_runs import TINY, train

CPU_MEMORY = {"device": "cpu", "pin_memory": True}
OFFLOADED = {
    "optimizer-1": {"stage": 1, "offload_optimizer": CPU_MEMORY},
    "optimizer-2": {"stage": 2, "offload_optimizer": CPU_MEMORY},
    "parameters": {"stage": 3, "offload_param": CPU_MEMORY},
    "both": {"stage": 3, "offload_param": CPU_MEMORY, "offload_optimizer": CPU_MEMORY},
}


@pytest.mark.parametrize("form", ["fp32", "bf16"])
@pytest.mark.parametrize("name", OFFLOADED)
def test_training_is_that_without(tmp_path, name, form):
    """torch's AdamW updates on the CPU what a GPU's kernel would update."""
    zero = {"stage3_param_persistence_threshold": 0, **OFFLOADED[name]}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": zero}))
    argv = [*TINY, *(["--bf16"] if form == "bf16" else [])]
    found = train([*argv, "--deepspeed_config", str(path)])
    expected = train([*argv, "--zero-stage", "1"])
    limit = 1e-3 if form == "fp32" else 2e-2
    np.testing.assert_allclose(found.losses, expected.losses, rtol=limit)
    np.testing.assert_allclose(found.norms[0], expected.norms[0], rtol=limit)
    assert found.losses[-1] < found.losses[0] - 0.3, "the run must learn something"
