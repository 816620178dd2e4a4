"""Batches with packed samples, against a plain loop over tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.gpt_batch import GPTCollator
from megatron.data.samples import PackedSample
from megatron.features.instruction.batches import ExampleCollator, Padding

EOD = 0


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
    for collate in (GPTCollator(), GPTCollator(EOD, True, True, True, pad_token=2)):
        batch = ExampleCollator(collate)([packed(tokens, mask, documents)])
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
    collator = ExampleCollator(GPTCollator(*flags))
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


@pytest.mark.parametrize("padding", [None, Padding(3)])
def test_keys_are_of_samples_and_not_of_batches(padding: Padding | None) -> None:
    """Whatever they are padded to, and those of plain samples as where no examples are read."""
    collate = GPTCollator(identifies=True)
    examples = ExampleCollator(collate, padding)
    long = packed([1, 2, 3, 4], [0, 1, 1], [0, 0, 0])
    short = packed([1, 2], [1], [0]) if padding else packed([1, 2, 5, 5], [1, 0, 0], [0, 1, 1])
    together, plain = examples([long, short]).keys_B, np.array([5, 0, 7, 8])
    assert together.equal(torch.cat([examples([each]).keys_B for each in (long, short)]))
    assert examples([plain, long]).keys_B[0] == collate([plain]).keys_B[0]
    assert len({*together.tolist(), int(collate([plain]).keys_B)}) == 3
    assert ExampleCollator(GPTCollator(), padding)([long]).keys_B is None
