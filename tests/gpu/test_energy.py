"""The counter of the GPU under the tests: it grows, at a power that the card can have."""

import time

import pytest
import torch
from gpu_runs import DEVICE, needs_gpu

from megatron.features.energy.callback import NvmlCounter, uuid_of


@needs_gpu
def test_the_counter_of_this_gpu():
    uuid = uuid_of(DEVICE)
    if uuid.startswith("MIG-"):
        pytest.skip("a part of a GPU has no counter")
    counter = NvmlCounter(uuid)
    began, first = time.monotonic(), counter.joules()
    a = torch.randn(4096, 4096, device=DEVICE)
    while (seconds := time.monotonic() - began) < 3:
        a = (a @ a).clamp(-1, 1)
        torch.cuda.synchronize()
    watts = (counter.joules() - first) / seconds
    assert 20 < watts < 3000, f"{watts:.0f} W"
