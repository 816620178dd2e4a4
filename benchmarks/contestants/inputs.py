"""Input of the peers: samples and initial weights, from the setting's folder, or drawn as the
trainer draws its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contestants import drawn
from contestants.setting import Setting

Parts = tuple[np.ndarray, ...]
"""Parts of a sample, or of several: what the plain model of the family is called with."""

FIELDS = {
    "bert": ("tokens_S", "types_S", "padding_mask_S", "labels_S", "is_random"),
    "t5": ("encoder_tokens_E", "encoder_padding_mask_E", "decoder_tokens_D", "labels_D"),
}


def parts(family: str, sample: Any) -> Parts:
    """Return the parts of one of the trainer's samples that a peer needs; of a GPT's, [S + 1],
    tokens and labels."""
    if family == "gpt":
        return sample[:-1], sample[1:]
    return tuple(np.asarray(getattr(sample, name)) for name in FIELDS[family])


class Samples(Sequence[Parts]):
    """The trainer's first samples for ``--mock-data``, in its order."""

    def __init__(self, setting: Setting) -> None:
        self.family, self.stored, self.drawn = setting.family, None, None
        if setting.folder:
            with np.load(setting.samples) as file:
                self.stored = [file[name] for name in file.files]
        else:
            self.drawn = drawn.samples(setting)

    def __len__(self) -> int:
        return len(self.drawn) if self.stored is None else len(self.stored[0])

    def __getitem__(self, index: Any) -> Any:
        if self.stored is not None:
            return tuple(array[index] for array in self.stored)
        return parts(self.family, self.drawn[index])


def batches(setting: Setting, device: torch.device) -> Iterator[tuple[Tensor, ...]]:
    """The samples in micro batches, over and over: int64, on ``device``."""
    known = Samples(setting)
    size, at = setting.micro_batch, 0
    while True:
        rows = [known[(at + n) % len(known)] for n in range(size)]
        at += size
        batch = [
            torch.from_numpy(np.stack(each).astype(np.int64)) for each in zip(*rows, strict=True)
        ]
        if device.type == "cuda":
            batch = [each.pin_memory().to(device, non_blocking=True) for each in batch]
        yield tuple(batch)


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
