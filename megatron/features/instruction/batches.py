"""Micro batches of instructions and answers: padding, loss weights, and positions for the head.

Shape suffixes: B micro batch, S sequence, T the S + 1 tokens of a sample, P positions, E
examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron.data.gpt_batch import GPTBatch, key_of, positions_within
from megatron.data.samples import PackedSample
from megatron.tokenizer import Tokenizer

HEAD_POSITIONS = 8
"""Logits are computed for a multiple of this number of positions, which suits the kernels."""


def padding_token(tokenizer: Tokenizer) -> int:
    """Return the tokenizer's padding token, or else its end-of-document token."""
    try:
        return tokenizer.pad
    except ValueError:
        return tokenizer.eod


@dataclass(frozen=True)
class Padding:
    """Padding of samples of different lengths to the longest of a batch."""

    token: int
    multiple: int = 1
    """The padded length is rounded up to a multiple of this."""

    def filled(
        self, samples: Sequence[np.ndarray | PackedSample]
    ) -> tuple[list[np.ndarray | PackedSample], bool]:
        """Return samples of equal length, and whether attention must separate documents within any
        of them."""
        inputs = max(len(s.loss_mask_S) if isinstance(s, PackedSample) else len(s) - 1
                     for s in samples)  # fmt: skip
        inputs = -(-inputs // self.multiple) * self.multiple
        filled: list[np.ndarray | PackedSample] = []
        separate = False
        for sample in samples:
            if not isinstance(sample, PackedSample):
                assert len(sample) == inputs + 1, (len(sample), inputs)
                filled.append(sample)
                separate = True
                continue
            missing = inputs - len(sample.loss_mask_S)
            last = sample.document_ids_S[-1]
            separate |= bool((sample.document_ids_S[sample.loss_mask_S > 0] != 0).any())
            filled.append(
                PackedSample(
                    np.pad(sample.tokens_T, (0, missing), constant_values=self.token),
                    np.pad(sample.loss_mask_S, (0, missing)),
                    np.pad(sample.document_ids_S, (0, missing), constant_values=last + 1),
                )
            )
        return filled, separate


@dataclass(frozen=True)
class ExampleCollator:
    """Collator of PackedSamples and samples of plain documents (int64[S + 1]) into a GPTBatch."""

    collate: Callable[[Sequence[np.ndarray]], GPTBatch]
    """Collator of plain token ids, which applies the flags for plain documents."""
    padding: Padding | None = None
    """Padding of PackedSamples to equal lengths; None if they all have the same length."""
    weigh_by: str | None = None
    """Unit that counts equally in the loss of a step: ``micro-batches``, ``tokens`` or
    ``examples``. None adds no loss weights to batches."""
    head_multiple: int | None = None
    """Set ``positions_BP`` of batches to the positions in the loss, rounded up to a multiple of
    this number, unless that would be all positions. None computes all positions."""

    def __call__(self, samples: Sequence[np.ndarray | PackedSample]) -> GPTBatch:
        originals, separate = samples, self.padding is None
        if self.padding is not None:
            samples, separate = self.padding.filled(samples)
        packed = {row: s for row, s in enumerate(samples) if isinstance(s, PackedSample)}
        batch = self.collate([s.tokens_T if isinstance(s, PackedSample) else s for s in samples])
        if batch.keys_B is not None:
            # Keys must not depend on the padding, which differs from batch to batch.
            batch = batch._replace(keys_B=torch.tensor([*map(_key, originals)]))
        if packed:
            batch = _with_packed(batch, packed)
        if self.weigh_by is not None:
            batch = _weighed(batch, self.weigh_by)
        if self.head_multiple is not None:
            batch = batch._replace(
                positions_BP=_counted_positions(batch.loss_mask_BS, self.head_multiple)
            )
        # In a row with one example and padding, causal attention alone hides the padding.
        return batch if separate else batch._replace(position_ids_BS=None, document_ids_BS=None)


def _key(sample: np.ndarray | PackedSample) -> int:
    if isinstance(sample, PackedSample):
        return key_of(sample.tokens_T, sample.document_ids_S)
    return key_of(sample)


def _with_packed(batch: GPTBatch, packed: Mapping[int, PackedSample]) -> GPTBatch:
    shape = batch.tokens_BS.shape
    positions_BS, document_ids_BS = batch.position_ids_BS, batch.document_ids_BS
    if positions_BS is None:
        positions_BS = torch.arange(shape[1]).repeat(shape[0], 1)
    if document_ids_BS is None:
        document_ids_BS = torch.zeros(shape, dtype=torch.int64)
    for row, sample in packed.items():
        batch.loss_mask_BS[row] = torch.from_numpy(sample.loss_mask_S)
        document_ids_BS[row] = torch.from_numpy(sample.document_ids_S)
        positions_BS[row] = positions_within(document_ids_BS[row : row + 1])[0]
    return batch._replace(position_ids_BS=positions_BS, document_ids_BS=document_ids_BS)


def _weighed(batch: GPTBatch, by: str) -> GPTBatch:
    """Add loss weights to a batch. By ``examples``, every document gets an equal share of the loss
    mask, whose sum remains the number of tokens in the loss."""
    mask_BS, documents_BS = batch.loss_mask_BS, batch.document_ids_BS
    counted = mask_BS.sum().double()
    weight = {"micro-batches": torch.ones_like(counted), "tokens": counted}.get(by)
    if weight is None:
        numbers_BS = torch.arange(len(mask_BS))[:, None].expand_as(mask_BS)
        if documents_BS is not None:
            numbers_BS = numbers_BS * (int(documents_BS.max()) + 1) + documents_BS
        counts_E = torch.bincount(numbers_BS.flatten(), mask_BS.flatten().double())
        weight = (counts_E > 0).sum().double()
        share = counted / weight.clamp(min=1)
        mask_BS = (mask_BS * share / counts_E[numbers_BS].clamp(min=1)).float()
    return batch._replace(loss_mask_BS=mask_BS, weights_2=torch.stack((weight, counted)))


def _counted_positions(loss_mask_BS: Tensor, multiple: int) -> Tensor | None:
    """Return ``GPTBatch.positions_BP`` for all rows together, [1, P], where P is a multiple of
    ``multiple``. Return None if that would be all positions."""
    mask_T = loss_mask_BS.flatten()
    count = max(1, int((mask_T > 0).sum()))
    count = -(-count // multiple) * multiple
    if count >= len(mask_T):
        return None
    # Each position occurs once, so gradients are not sums whose order may vary.
    return (mask_T == 0).to(torch.uint8).argsort(stable=True)[None, :count].contiguous()


def example_lengths(batch: GPTBatch) -> Tensor:
    """Return the length of each token's document, float32 [B, S]. In a row with one document and
    padding, the document ends at the last token in the loss."""
    if batch.document_ids_BS is None:
        counted_BS = batch.loss_mask_BS > 0
        numbers_S = torch.arange(1, counted_BS.shape[1] + 1, device=counted_BS.device)
        last_B1 = (counted_BS * numbers_S).amax(1, keepdim=True).clamp(min=1)
        return last_B1.expand(counted_BS.shape).float()
    ids_BS = batch.document_ids_BS
    counts_BD = torch.zeros(ids_BS.shape[0], ids_BS.shape[1] + 1, device=ids_BS.device)
    counts_BD.scatter_add_(1, ids_BS, torch.ones_like(ids_BS, dtype=torch.float32))
    return counts_BD.gather(1, ids_BS)
