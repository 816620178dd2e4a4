"""Memory of a training on a GPU, against what the planner predicts."""

import pytest
import torch
from gpu_runs import DEVICE, ON_GPU, RUN, SHAPE, trainer

from megatron.planning.memory import peak_memory

LARGE = (
    "--num-layers 6 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
    "--vocab-size 32000 --train-iters 3"
).split()
"""90 million parameters, so that libraries' own workspaces hardly count; the CPU's are smaller."""
SMALLER = "--num-layers 2 --hidden-size 64 --seq-length 32 --train-iters 3".split()
RUNS = {
    "zero0": ["--zero-stage", "0"],
    "zero1-bf16": ["--bf16", "--zero-stage", "1"],
    "zero3-bf16": ["--bf16", "--zero-stage", "3"],
    "zero1-bf16-fp32-sums": ["--bf16", "--zero-stage", "1", "--accumulate-allreduce-grads-in-fp32"],
    "zero1-bf16-recomputed": ["--bf16", "--zero-stage", "1", "--recompute-granularity", "full"],
}


@pytest.mark.parametrize("name", RUNS)
def test_peak_is_no_more_than_planned(name):
    argv = [*SHAPE, *RUN, *(LARGE if ON_GPU else SMALLER), *RUNS[name]]
    before = torch.cuda.memory_allocated(DEVICE) if ON_GPU else 0
    with trainer(argv) as built:
        config = built.engine.config
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats(DEVICE)
        built.fit()
        planned = peak_memory(config.model, config.layout(), config.training.micro_batch_size, 2)
        assert planned.total > 12 * sum(param.numel() for param in built.engine.names)
        if ON_GPU:
            peak = torch.cuda.max_memory_allocated(DEVICE) - before
            print(f"{name}: {peak / 2**20:.0f} MiB, planned {planned.total / 2**20:.0f}")
            assert peak <= 1.1 * planned.total
