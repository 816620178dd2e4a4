"""What the peers read: samples and initial weights, from the setting's folder, or drawn as the
trainer draws its own. Shapes: B micro batch, S sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contestants import drawn
from contestants.setting import Setting


def samples(setting: Setting) -> Sequence[Any]:
    """The trainer's first samples for ``--mock-data``, in its order, [S + 1] each."""
    return np.load(setting.tokens, mmap_mode="r") if setting.folder else drawn.samples(setting)


def batches(setting: Setting, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """(tokens_BS, labels_BS), int64, on ``device``: the samples, over and over."""
    known = samples(setting)
    size, at = setting.micro_batch, 0
    while True:
        rows = [(at + n) % len(known) for n in range(size)]
        at += size
        batch = torch.from_numpy(np.stack([known[row] for row in rows]).astype(np.int64))
        if device.type == "cuda":
            batch = batch.pin_memory().to(device, non_blocking=True)
        yield batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def weights(setting: Setting, device: torch.device) -> dict[str, Tensor]:
    """The weights that all start from, under the names of `transformers`; drawn ones are on
    ``device``."""
    if not setting.folder:
        return drawn.huggingface_weights(setting, device)
    from safetensors.torch import load_file  # only where there are files

    found: dict[str, Tensor] = {}
    for path in sorted(setting.weights.glob("*.safetensors")):
        found |= load_file(path)
    return found
