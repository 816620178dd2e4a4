"""Memory of a training on a GPU, against what the planner predicts."""

import pytest
import torch
from gpu_runs import DEVICE, RUN, SHAPE, needs_gpu, trainer

from megatron.apps.planning.memory import peak_memory

LARGE = (
    "--num-layers 6 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
    "--vocab-size 32000 --train-iters 3"
).split()
"""90 million parameters, so that libraries' own workspaces hardly count."""
RUNS = {
    "zero0": ["--zero-stage", "0"],
    "zero1-bf16": ["--bf16", "--zero-stage", "1"],
    "zero3-bf16": ["--bf16", "--zero-stage", "3"],
    "zero1-bf16-fp32-sums": ["--bf16", "--zero-stage", "1", "--accumulate-allreduce-grads-in-fp32"],
    "zero1-bf16-recomputed": ["--bf16", "--zero-stage", "1", "--recompute-granularity", "full"],
}


@needs_gpu  # of a CPU's memory nobody counts the peak
@pytest.mark.parametrize("name", RUNS)
def test_peak_is_no_more_than_planned(name):
    before = torch.cuda.memory_allocated(DEVICE)
    with trainer([*SHAPE, *RUN, *LARGE, *RUNS[name]]) as built:
        config = built.engine.config
        torch.cuda.reset_peak_memory_stats(DEVICE)
        built.fit()
        planned = peak_memory(config.model, config.layout(), config.training.micro_batch_size, 2)
        peak = torch.cuda.max_memory_allocated(DEVICE) - before
    print(f"{name}: {peak / 2**20:.0f} MiB, planned {planned.total / 2**20:.0f}")
    assert peak <= 1.1 * planned.total
