"""Which samples a rank reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.sampler import MicroBatchSampler, micro_batch_samples


def test_order_by_hand() -> None:
    """micro batch 2, 3 ranks: 0 1 | 2 3 | 4 5, then 6 7 | 8 9 | 10 11."""
    first = [list(micro_batch_samples(0, 2, rank, 3)) for rank in range(3)]
    second = [list(micro_batch_samples(6, 2, rank, 3)) for rank in range(3)]
    assert first == [[0, 1], [2, 3], [4, 5]]
    assert second == [[6, 7], [8, 9], [10, 11]]


@given(
    total=st.integers(0, 100),
    consumed=st.integers(0, 50),
    micro=st.integers(1, 5),
    size=st.integers(1, 5),
)
def test_every_sample_once(total: int, consumed: int, micro: int, size: int) -> None:
    streams = [list(MicroBatchSampler(total, consumed, micro, r, size)) for r in range(size)]
    assert len({len(stream) for stream in streams}) == 1
    seen = sorted(i for stream in streams for batch in stream for i in batch)
    together = micro * size
    end = consumed + max(0, total - consumed) // together * together
    assert seen == list(range(consumed, end))


@pytest.mark.parametrize("arguments", [(-1, 1, 0, 1), (0, 0, 0, 1), (0, 1, 1, 1), (0, 1, -1, 2)])
def test_bad_arguments(arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="no samples for"):
        micro_batch_samples(*arguments)
