"""Batches, against a plain loop over tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.gpt_batch import GPTBatch, GPTCollator

EOD = 0


def by_loop(sample: list[int]) -> tuple[list[int], list[int], list[float]]:
    """Positions, document ids and loss mask of one sample."""
    positions, documents, mask = [], [], []
    position = document = 0
    for token in sample[:-1]:
        positions.append(position)
        documents.append(document)
        mask.append(0.0 if token == EOD else 1.0)
        position += 1
        if token == EOD:
            position, document = 0, document + 1
    return positions, documents, mask


@given(
    st.integers(1, 12).flatmap(
        lambda s: st.lists(
            st.lists(st.integers(0, 2), min_size=s + 1, max_size=s + 1), min_size=1, max_size=4
        )
    )
)
def test_against_a_loop(samples: list[list[int]]) -> None:
    batch = GPTCollator(EOD, True, True, True)([np.array(s) for s in samples])
    positions, documents, masks = zip(*map(by_loop, samples), strict=True)
    assert batch.tokens_BS.tolist() == [s[:-1] for s in samples]
    assert batch.labels_BS.tolist() == [s[1:] for s in samples]
    assert batch.position_ids_BS is not None and batch.document_ids_BS is not None
    assert batch.position_ids_BS.tolist() == list(positions)
    assert batch.document_ids_BS.tolist() == list(documents)
    assert batch.loss_mask_BS.tolist() == list(masks)


def test_by_hand() -> None:
    """5 6 EOD 7 EOD EOD 8: the end of a document belongs to it."""
    batch = GPTCollator(EOD, True, True, True)([np.array([5, 6, 0, 7, 0, 0, 8, 9])])
    assert batch.position_ids_BS.tolist() == [[0, 1, 2, 0, 1, 0, 0]]
    assert batch.document_ids_BS.tolist() == [[0, 0, 0, 1, 1, 2, 3]]
    assert batch.loss_mask_BS.tolist() == [[1, 1, 0, 1, 0, 0, 1]]


def test_dtypes_and_layout() -> None:
    batch = GPTCollator(EOD, True, True, True)([np.arange(5)] * 2)
    assert [t.dtype for t in batch[:5]] == [torch.int64] * 2 + [torch.float32] + [torch.int64] * 2
    assert all(t.is_contiguous() and t.shape == (2, 4) for t in batch[:5])
    assert all(field is None for field in batch[5:])


@pytest.mark.parametrize("eod", [None, EOD])
def test_nothing_is_reset_without_flags(eod: int | None) -> None:
    batch = GPTCollator(eod)([np.array([1, 0, 1])])
    assert batch.position_ids_BS is None and batch.document_ids_BS is None
    assert batch.loss_mask_BS.tolist() == [[1, 1]]


@pytest.mark.parametrize("name", ["reset_position_ids", "reset_attention_mask", "eod_mask_loss"])
def test_a_flag_needs_the_token(name: str) -> None:
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} needs an end-of-document"):
        GPTCollator(None, **{name: True})


def test_to_another_device() -> None:
    batch = GPTCollator(EOD, reset_position_ids=True)([np.arange(5)]).to("meta")
    assert isinstance(batch, GPTBatch)
    assert batch.tokens_BS.device.type == batch.position_ids_BS.device.type == "meta"
    assert batch.document_ids_BS is None


def test_no_loss_on_padding() -> None:
    batch = GPTCollator(pad_token=3)([np.array([3, 1, 3, 3])])
    assert batch.loss_mask_BS.tolist() == [[1, 0, 0]]
