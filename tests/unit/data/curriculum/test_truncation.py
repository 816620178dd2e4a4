"""Batches that are cut, against batches of short samples."""

import numpy as np
import pytest
import torch

from megatron.data.batch import GPTCollator
from megatron.data.curriculum.truncation import cut, truncated
from megatron.data.masked.batch import BertBatch


def test_cut_batches_against_batches_of_cut_samples():
    """Every field: tokens, labels, loss masks, positions and documents."""
    rng = np.random.default_rng(0)
    samples = [rng.integers(0, 4, 33) for _ in range(3)]
    collate = GPTCollator(
        eod_token=0, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True
    )
    for length in (8, 24, 32):
        found = truncated(collate(samples), length)
        wanted = collate([sample[: length + 1] for sample in samples])
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.equal(ours, theirs) and ours.is_contiguous()
    plain = truncated(GPTCollator()(samples), 8)
    assert plain.tokens_BS.shape == (3, 8) and plain.position_ids_BS is None


def test_no_batch_is_taken_before_it_is_asked_for():
    """The step after this one cuts otherwise."""
    samples = [np.arange(17)]
    batches = iter([GPTCollator()(samples) for _ in range(4)])
    first = cut(batches, 8)
    assert [next(first).tokens_BS.shape[1] for _ in range(2)] == [8, 8]
    assert next(cut(batches, 16)).tokens_BS.shape == (1, 16)
    assert len(list(batches)) == 1


def test_batches_of_other_models_are_refused():
    with pytest.raises(ValueError, match="cuts samples of GPTs; a BertBatch is made of parts"):
        truncated(BertBatch(*[torch.zeros(1, 16)] * 6), 8)
