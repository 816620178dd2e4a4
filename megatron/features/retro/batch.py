"""Batches of samples with the neighbours of their chunks.

Shape suffixes: B micro batch, S sequence, L chunks of a sample, K neighbours of a chunk, R tokens
of a neighbour with its continuation, D documents of a sample, 2 the dataset and document of each.
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
    """What the collator of the text takes."""
    neighbors_LKR: npt.NDArray[np.int64]
    chunks_LK: npt.NDArray[np.int64] | None = None
    """Numbers of the neighbours in the database, -1 where there are fewer; None where they are of
    no database."""
    documents_D2: npt.NDArray[np.int64] | None = None
    """The documents that the text is from; None unless wanted."""


class RetroBatch(NamedTuple):
    text: Any
    """The batch of the text."""
    neighbors_BLKR: Tensor
    """Tokens of the neighbours of every chunk, int64; where there are fewer, or a document ends
    early, the end-of-document token."""
    documents_BD2: Tensor | None = None
    """The documents that each sample is from, int64: the number of the dataset in the database, -1
    where it is not in it, and that of the document there; both -1 after the last one. None unless
    --retro-return-doc-ids."""

    @classmethod
    def alone(cls, text: Any) -> RetroBatch:
        """Text without neighbours, whose model attends to none: the paper's Retro[Off]."""
        return cls(text, torch.empty(text.tokens_BS.shape[0], 0, 0, 0, dtype=torch.int64))

    @property
    def tokens_BS(self) -> Tensor:
        tokens_BS: Tensor = self.text.tokens_BS
        return tokens_BS

    @property
    def loss_mask_BS(self) -> Tensor:
        loss_mask_BS: Tensor = self.text.loss_mask_BS
        return loss_mask_BS

    def to(self, device: torch.device | str, non_blocking: bool = False) -> RetroBatch:
        documents = self.documents_BD2
        return RetroBatch(
            self.text.to(device, non_blocking),
            self.neighbors_BLKR.to(device, non_blocking=non_blocking),
            None if documents is None else documents.to(device, non_blocking=non_blocking),
        )

    def shortened(self, seq_length: int) -> RetroBatch:
        """The first ``seq_length`` tokens of every sample, which are whole chunks, and their
        neighbours."""
        chunk_length = self.tokens_BS.shape[1] // self.neighbors_BLKR.shape[1]
        assert seq_length % chunk_length == 0, (seq_length, chunk_length)
        neighbors_BLKR = self.neighbors_BLKR[:, : seq_length // chunk_length].contiguous()
        return RetroBatch(self.text.shortened(seq_length), neighbors_BLKR, self.documents_BD2)


@dataclass(frozen=True)
class RetroCollator:
    """Batches samples with their neighbours; ``collate`` batches their text."""

    collate: Callable[[Sequence[Any]], Any]

    def __call__(self, samples: Sequence[RetroSample]) -> RetroBatch:
        neighbors_BLKR = np.stack([sample.neighbors_LKR for sample in samples])
        documents = [sample.documents_D2 for sample in samples if sample.documents_D2 is not None]
        return RetroBatch(
            self.collate([sample.text for sample in samples]),
            torch.from_numpy(neighbors_BLKR),
            torch.from_numpy(_stacked(documents)) if documents else None,
        )


def _stacked(rows: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Rows [D, 2] of several lengths, with -1 after those of each, [B, D, 2]."""
    stacked = np.full((len(rows), max(map(len, rows)), 2), -1, np.int64)
    for filled, row in zip(stacked, rows, strict=True):
        filled[: len(row)] = row
    return stacked
