"""Choosing the neighbours of a chunk among the nearest ones."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron.apps.retro.query.retriever import first_kept


@st.composite
def choices(draw):
    queries, searched = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    dropped = np.array(draw(st.lists(st.booleans(), min_size=32, max_size=32)))
    numbers = np.arange(1, 33).reshape(4, 8)[:queries, :searched]
    return numbers, dropped.reshape(4, 8)[:queries, :searched], draw(st.integers(1, searched))


@given(choices())
def test_the_first_that_are_kept_followed_by_minus_one(made):
    numbers, dropped, k = made
    expected = []
    for row, out in zip(numbers.tolist(), dropped.tolist(), strict=True):
        kept = [number for number, left in zip(row, out, strict=True) if not left][:k]
        expected.append(kept + [-1] * (k - len(kept)))
    np.testing.assert_array_equal(first_kept(numbers, dropped, k), expected)
