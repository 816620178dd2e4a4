"""Batches that are sent to a GPU ahead of their use."""

import itertools

import numpy as np
import torch
from gpu_runs import DEVICE, ON_GPU

from megatron.data.loader import Prefetcher


def test_batches_arrive_in_order_and_whole():
    """While the device is busy, so that a batch that is used too early shows."""
    work = torch.randn(512, 512, device=DEVICE)
    batches = Prefetcher((np.full((64, 1024), n) for n in range(50)), device=DEVICE)
    for number in itertools.count():
        batch = next(batches, None)
        if batch is None:
            break
        assert batch.is_cuda == ON_GPU
        for _ in range(4):
            work = (work @ work).clamp(-1, 1)
        assert bool((batch == number).all())
        del batch  # its memory goes to a later one only when the device is done with it
    assert number == 50
