"""Synthetic samples."""

import numpy as np
import pytest

from megatron.data.gpt_dataset import MockGPTDataset


def test_a_function_of_seed_part_and_number() -> None:
    def sample(seed: int = 1, part: int = 0, index: int = 3, count: int = 10) -> list[int]:
        return MockGPTDataset(count, 64, 1000, seed, part, 0)[index].tolist()

    assert sample() == sample() == sample(count=1000)
    different = [sample(), sample(seed=2), sample(part=1), sample(index=4)]
    assert len({tuple(s) for s in different}) == 4


def test_samples_are_documents_of_counted_tokens() -> None:
    dataset = MockGPTDataset(50, 128, 1000, seed=1, eod_token=999)
    samples = np.stack([dataset[i] for i in range(len(dataset))])
    assert samples.shape == (50, 129) and samples.dtype == np.int64
    assert samples.min() >= 0 and samples.max() == 999
    inside = (samples[:, :-1] != 999) & (samples[:, 1:] != 999)
    counted = (samples[:, :-1] + 1) % 1000 == samples[:, 1:]
    assert counted[inside].all()
    assert 0.005 < (samples == 999).mean() < 0.04


def test_out_of_range() -> None:
    with pytest.raises(IndexError, match="sample 2 of a dataset of 2"):
        MockGPTDataset(2, 8, 10, seed=1)[2]
