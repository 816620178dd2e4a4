"""Micro batches of the file that the peers read; shapes: B micro batch, S sequence."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from contestants.setting import Setting


def batches(setting: Setting, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """(tokens_BS, labels_BS), int64, on ``device``, over and over.

    They are the samples that the trainer's own loader makes for ``--mock-data``, in its order.
    """
    samples = np.load(setting.tokens, mmap_mode="r")
    size, at = setting.micro_batch, 0
    while True:
        rows = [(at + n) % len(samples) for n in range(size)]
        at += size
        batch = torch.from_numpy(samples[rows].astype(np.int64))
        if device.type == "cuda":
            batch = batch.pin_memory().to(device, non_blocking=True)
        yield batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
