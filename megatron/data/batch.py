"""From samples to the tensors that a GPT is trained on.

Shape suffixes: B micro batch, S sequence (without the extra token of a sample).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class GPTBatch(NamedTuple):
    """One micro batch."""

    tokens_BS: Tensor
    """Input, int64."""
    labels_BS: Tensor
    """The token after each input token, int64."""
    loss_mask_BS: Tensor
    """1.0 where the loss counts, else 0.0; float32."""
    position_ids_BS: Tensor | None
    """int64; None when positions simply count from 0 to S - 1."""
    document_ids_BS: Tensor | None
    """int64; a token attends to equal ids only. None when it attends across documents."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> GPTBatch:
        """The same batch on another device."""
        return GPTBatch._make(
            None if tensor is None else tensor.to(device, non_blocking=non_blocking)
            for tensor in self
        )


@dataclass(frozen=True)
class GPTCollator:
    """Stacks samples, int64[S + 1] each, into a GPTBatch.

    Raises:
        ValueError: a flag needs the end-of-document token and the tokenizer has none.
    """

    eod_token: int | None = None
    reset_position_ids: bool = False
    """Positions restart after each end-of-document token."""
    reset_attention_mask: bool = False
    """Attention stays within a document; an end-of-document token belongs to what it ends."""
    eod_mask_loss: bool = False
    """No loss where the input is the end-of-document token."""

    def __post_init__(self) -> None:
        flags = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        for name in flags:
            if getattr(self, name) and self.eod_token is None:
                raise ValueError(
                    f"--{name.replace('_', '-')} needs an end-of-document token, and the tokenizer "
                    "has none"
                )

    def __call__(self, samples: Sequence[np.ndarray]) -> GPTBatch:
        """Samples, B times int64[S + 1], to a batch."""
        sample_BT = torch.from_numpy(np.stack(samples))
        tokens_BS, labels_BS = sample_BT[:, :-1].contiguous(), sample_BT[:, 1:].contiguous()
        loss_mask_BS = torch.ones(tokens_BS.shape, dtype=torch.float32)
        if self.eod_token is None:
            return GPTBatch(tokens_BS, labels_BS, loss_mask_BS, None, None)
        is_eod_BS = tokens_BS == self.eod_token
        if self.eod_mask_loss:
            loss_mask_BS[is_eod_BS] = 0.0
        return GPTBatch(
            tokens_BS,
            labels_BS,
            loss_mask_BS,
            _restarting_positions(is_eod_BS) if self.reset_position_ids else None,
            _document_ids(is_eod_BS) if self.reset_attention_mask else None,
        )


def _document_ids(is_eod_BS: Tensor) -> Tensor:
    """End-of-document tokens strictly before each position."""
    return is_eod_BS.cumsum(dim=1) - is_eod_BS.long()


def _restarting_positions(is_eod_BS: Tensor) -> Tensor:
    positions_S = torch.arange(is_eod_BS.shape[1])
    start_BS = torch.zeros_like(is_eod_BS, dtype=torch.int64)
    start_BS[:, 1:] = torch.where(is_eod_BS[:, :-1], positions_S[1:], 0)
    return positions_S - start_BS.cummax(dim=1).values
