"""Samples of BERT and T5, and the tensors that they are trained on.

Shape suffixes: B micro batch, S tokens of a BERT sample, E of a T5 encoder's input, D of its
decoder's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class BertSample(NamedTuple):
    """One sample, padded to the sequence length."""

    tokens_S: npt.NDArray[np.int64]
    """Input: specials, segments with some tokens replaced, padding."""
    types_S: npt.NDArray[np.int64]
    """0 for `[CLS] A [SEP]` and padding, 1 for `B [SEP]`."""
    labels_S: npt.NDArray[np.int64]
    """The token that was here, where it is to be predicted; NO_LABEL elsewhere."""
    is_random: int
    """1 where the second segment does not belong behind the first; 0 without pairs."""
    loss_mask_S: npt.NDArray[np.float32]
    """1.0 where a token is to be predicted."""
    padding_mask_S: npt.NDArray[np.int64]
    """1 for tokens, 0 for padding."""


class BertBatch(NamedTuple):
    """One micro batch; in this order Megatron's text, types, labels, is_random, loss_mask and
    padding_mask."""

    tokens_BS: Tensor
    """Input, int64."""
    types_BS: Tensor
    """0 for `[CLS] A [SEP]` and padding, 1 for `B [SEP]`; int64."""
    labels_BS: Tensor
    """The token that was here, where it is to be predicted, -1 elsewhere; int64."""
    is_random_B: Tensor
    """1 where the second segment does not belong behind the first; int64."""
    loss_mask_BS: Tensor
    """1.0 where a token is to be predicted; float32."""
    padding_mask_BS: Tensor
    """1 for tokens, 0 for padding; int64. Attention is among tokens alone."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> BertBatch:
        """The same batch on another device."""
        return BertBatch._make(tensor.to(device, non_blocking=non_blocking) for tensor in self)


class T5Sample(NamedTuple):
    """One sample, padded to the two sequence lengths."""

    encoder_tokens_E: npt.NDArray[np.int64]
    """The text with a sentinel for each span, and the end."""
    decoder_tokens_D: npt.NDArray[np.int64]
    """The labels, one to the right, behind the start token."""
    labels_D: npt.NDArray[np.int64]
    """Each sentinel and its span, and the end; NO_LABEL on padding."""
    loss_mask_D: npt.NDArray[np.float32]
    """1.0 for labels, 0.0 on padding."""
    encoder_padding_mask_E: npt.NDArray[np.int64]
    """1 for tokens, 0 for padding."""
    decoder_padding_mask_D: npt.NDArray[np.int64]
    """1 for tokens, 0 for padding."""


class T5Batch(NamedTuple):
    """One micro batch. Megatron's names: text_enc, text_dec, labels, loss_mask; its three square
    masks follow from the two padding masks:

        enc_mask      encoder_padding_mask_BE[:, :, None] * encoder_padding_mask_BE[:, None, :]
        dec_mask      the same of the decoder's, and no position sees a later one
        enc_dec_mask  decoder_padding_mask_BD[:, :, None] * encoder_padding_mask_BE[:, None, :]

    They are not made here: they are E * E + D * D + D * E numbers a sample, where attention needs
    E + D.
    """

    encoder_tokens_BE: Tensor
    """The encoder's input, int64."""
    decoder_tokens_BD: Tensor
    """The decoder's input, int64."""
    labels_BD: Tensor
    """What the decoder is to predict, -1 on padding; int64."""
    loss_mask_BD: Tensor
    """1.0 for labels, 0.0 on padding; float32."""
    encoder_padding_mask_BE: Tensor
    """1 for tokens, 0 for padding; int64."""
    decoder_padding_mask_BD: Tensor
    """1 for tokens, 0 for padding; int64."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> T5Batch:
        """The same batch on another device."""
        return T5Batch._make(tensor.to(device, non_blocking=non_blocking) for tensor in self)


def collate_bert(samples: Sequence[BertSample]) -> BertBatch:
    """Stacks samples of one length into a batch."""
    return BertBatch._make(map(_stack, zip(*samples, strict=True)))


def collate_t5(samples: Sequence[T5Sample]) -> T5Batch:
    """Stacks samples of the same lengths into a batch."""
    return T5Batch._make(map(_stack, zip(*samples, strict=True)))


def _stack(values: Sequence[np.ndarray | int]) -> Tensor:
    return torch.from_numpy(np.stack([np.asarray(value) for value in values]))
