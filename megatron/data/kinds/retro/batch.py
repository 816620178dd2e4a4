"""Batches of GPT samples with the neighbours of their chunks.

Shape suffixes: B micro batch, S sequence, T the S + 1 tokens of a sample, L chunks of a sample, K
neighbours of a chunk, R tokens of a neighbour with its continuation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class RetroSample(NamedTuple):
    text: Any
    """What a GPT's collator takes."""
    neighbors_LKR: npt.NDArray[np.int64]


class RetroBatch(NamedTuple):
    text: Any
    """What a GPT's collator makes."""
    neighbors_BLKR: Tensor
    """Tokens of the neighbours of every chunk, int64; where there are fewer, or a document ends
    early, the end-of-document token."""

    @property
    def tokens_BS(self) -> Tensor:
        tokens_BS: Tensor = self.text.tokens_BS
        return tokens_BS

    @property
    def loss_mask_BS(self) -> Tensor:
        loss_mask_BS: Tensor = self.text.loss_mask_BS
        return loss_mask_BS

    def to(self, device: torch.device | str, non_blocking: bool = False) -> RetroBatch:
        return RetroBatch(
            self.text.to(device, non_blocking),
            self.neighbors_BLKR.to(device, non_blocking=non_blocking),
        )


@dataclass(frozen=True)
class RetroCollator:
    """Batches samples with their neighbours; ``collate`` batches their text."""

    collate: Callable[[Sequence[Any]], Any]

    def __call__(self, samples: Sequence[RetroSample]) -> RetroBatch:
        neighbors_BLKR = np.stack([sample.neighbors_LKR for sample in samples])
        return RetroBatch(
            self.collate([sample.text for sample in samples]), torch.from_numpy(neighbors_BLKR)
        )
