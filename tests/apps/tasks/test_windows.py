"""Windows over a text: every token is scored once, given what it should be given."""

import numpy as np
import pytest

from megatron.apps.tasks.zeroshot.tasks import Windows


def context_of(target: int, length: int, stride: int) -> range:
    """The tokens before a target in its window: the first window that predicts it."""
    start = 0
    while start + length < target:
        start += stride
    return range(start, target)


@pytest.mark.parametrize("length, stride", [(8, 8), (8, 3), (8, 1), (5, 4), (1, 1)])
@pytest.mark.parametrize("tokens", [2, 5, 8, 9, 10, 16, 17, 18, 41])
def test_every_token_is_scored_once_in_the_first_window_that_has_it(tokens, length, stride):
    windows = Windows(np.arange(tokens), length, stride)
    seen = {}
    for window in windows:
        row = [*window.context, *window.continuation]
        assert len(row) <= length + 1
        for place, token in enumerate(row[len(window.context) :], len(window.context)):
            assert token not in seen
            seen[int(token)] = row[:place]
    assert list(seen) == list(range(1, tokens))
    assert windows.targets == tokens - 1
    for target, before in seen.items():
        assert before == list(context_of(target, length, stride))


def test_a_limit_keeps_the_first_windows():
    tokens = np.arange(41)
    windows = Windows(tokens, 8, 4, most=3)
    scored = np.concatenate([window.continuation for window in windows])
    assert scored.tolist() == list(range(1, 17)) and windows.targets == 16
    assert Windows(tokens, 8, 4, most=99).targets == 40
    assert [text.continuation[0] for text in windows[1:]] == [9, 13]
    with pytest.raises(IndexError, match="window 3 of 3"):
        windows[3]


@pytest.mark.parametrize("stride", [0, 9])
def test_a_stride_that_skips_tokens_is_refused(stride):
    with pytest.raises(ValueError, match=f"--overlapping-eval {stride} must be from 1 to .* 8"):
        Windows(np.arange(41), 8, stride)
