"""Batches, against a plain loop over tokens."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.gpt_batch import GPTBatch, GPTCollator
from megatron.data.pipeline import SequenceLengths
from megatron.data.samples import PackedSample

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


def packed(tokens: list[int], mask: list[int], documents: list[int]) -> PackedSample:
    return PackedSample(np.array(tokens), np.array(mask, np.float32), np.array(documents, np.int64))


DOCUMENTS = st.lists(st.integers(1, 5), min_size=1, max_size=5)
"""Lengths of the documents of a packed sample."""


@given(DOCUMENTS, st.data())
def test_packed_against_a_loop(lengths: list[int], data: st.DataObject) -> None:
    size = sum(lengths)
    documents = [d for d, length in enumerate(lengths) for _ in range(length)]
    positions = [p for length in lengths for p in range(length)]
    mask = data.draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
    tokens = data.draw(st.lists(st.integers(0, 2), min_size=size + 1, max_size=size + 1))
    # Whatever the flags say: there are tokens that look like ends of documents in it.
    for collator in (GPTCollator(), GPTCollator(EOD, True, True, True, pad_token=2)):
        batch = collator([packed(tokens, mask, documents)])
        assert batch.tokens_BS.tolist() == [tokens[:-1]]
        assert batch.labels_BS.tolist() == [tokens[1:]]
        assert batch.loss_mask_BS.tolist() == [mask]
        assert batch.position_ids_BS.tolist() == [positions]
        assert batch.document_ids_BS.tolist() == [documents]
        assert [t.dtype for t in batch[:5]] == [torch.int64] * 2 + [torch.float32] + [
            torch.int64
        ] * 2


@pytest.mark.parametrize("flags", [(None,), (EOD, True, True, True), (EOD, False, True, False)])
def test_packed_and_plain_samples_in_one_batch(flags: tuple) -> None:
    """A plain row is what it would be alone, with what it would have left unsaid spelled out."""
    plain = np.array([5, 0, 7, 8, 0, 9])
    sample = packed([1, 0, 2, 3, 0, 4], [0, 1, 0, 1, 1], [0, 0, 1, 1, 2])
    collator = GPTCollator(*flags)
    mixed, alone, both = collator([plain, sample]), collator([plain]), collator([sample])
    positions = alone.position_ids_BS
    documents = alone.document_ids_BS
    assert mixed.tokens_BS.tolist() == [plain[:-1].tolist(), sample.tokens_T[:-1].tolist()]
    assert mixed.loss_mask_BS[0].equal(alone.loss_mask_BS[0])
    assert mixed.position_ids_BS[0].equal(torch.arange(5) if positions is None else positions[0])
    assert mixed.document_ids_BS[0].equal(
        torch.zeros(5, dtype=torch.int64) if documents is None else documents[0]
    )
    assert all(t[1].equal(u[0]) for t, u in zip(mixed[:5], both[:5], strict=True))
    assert all(t.is_contiguous() for t in mixed[:5])


def test_no_loss_on_padding() -> None:
    batch = GPTCollator(pad_token=3)([np.array([3, 1, 3, 3])])
    assert batch.loss_mask_BS.tolist() == [[1, 0, 0]]


@pytest.mark.parametrize(("samples", "length"), [(4, 8), (3, 16), (1, 24), (2, 32), (5, 40)])
def test_folded_against_the_formula_on_texts(samples: int, length: int) -> None:
    """Rows of length + 1 tokens of each text, then the end of each; as many as the tokens make, an
    even number. Masks, positions and documents are those of the rows, but documents of a row are
    numbered as in its sample."""
    whole = 40
    text = np.random.default_rng(length).integers(0, 5, (samples, whole + 1))
    collate = GPTCollator(0, True, True, True)
    stages = [(0, length), (9, whole)]
    lengths = SequenceLengths(whole, stages, lambda steps: steps * samples, samples)
    (batch,) = lengths.cut(iter([collate(list(text))]), 0)
    width = length + 1
    keep = (whole + 1) // width * width
    rows = np.concatenate([text[:, :keep].reshape(-1, width), text[:, -width:]])
    count = min(math.ceil(text.size / width), len(rows))
    count -= count % 2 if count > 1 and length < whole else 0
    expected = collate(list(rows[: samples if length == whole else count]))
    for name in ("tokens_BS", "labels_BS", "loss_mask_BS", "position_ids_BS"):
        assert torch.equal(getattr(batch, name), getattr(expected, name)), name
    first = batch.document_ids_BS[:, :1]
    assert torch.equal(batch.document_ids_BS - first, expected.document_ids_BS)
    assert lengths.tokens(samples) == batch.tokens_BS.numel()
    assert lengths.tokens(9 * samples) == 9 * batch.tokens_BS.numel()
    assert lengths.samples(8 * batch.tokens_BS.numel()) == 8 * samples
