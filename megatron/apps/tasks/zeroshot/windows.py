"""A long text in windows of a model's length, in which every token is scored once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from megatron.config import ConfigError
from megatron.data.scored_text import ScoredText


class Windows(Sequence[ScoredText]):
    """Windows of ``length`` inputs, each ``stride`` tokens after the one before it.

    All tokens but the first are scored: those that the first window predicts, and of each other
    window the last ``stride``, which are new in it. So with a stride below the length every token
    has at least ``length - stride`` tokens before it, as soon as the text has that many.

    Args:
        tokens: the text, [T].
        length: inputs of a window.
        stride: at most the length; ConfigError otherwise, as tokens between windows would not
            count.
        most: windows that are used at most; None for all.
    """

    def __init__(
        self, tokens: npt.NDArray[np.int64], length: int, stride: int, most: int | None = None
    ) -> None:
        if not 0 < stride <= length:
            raise ConfigError(
                f"--overlapping-eval {stride} must be from 1 to --seq-length {length}: the tokens "
                "between two windows would not be scored"
            )
        assert len(tokens) > 1
        self._tokens, self._length, self._stride = tokens, length, stride
        count = 1 + max(0, -(-(len(tokens) - 1 - length) // stride))
        self._count = count if most is None else min(count, most)

    def __len__(self) -> int:
        return self._count

    @property
    def targets(self) -> int:
        """Tokens that are scored."""
        return min(len(self._tokens) - 1, self._length + (self._count - 1) * self._stride)

    @overload
    def __getitem__(self, index: int) -> ScoredText: ...
    @overload
    def __getitem__(self, index: slice) -> list[ScoredText]: ...
    def __getitem__(self, index: int | slice) -> ScoredText | list[ScoredText]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self._count))]
        if not 0 <= index < self._count:
            raise IndexError(f"window {index} of {self._count}")
        start = index * self._stride
        window = self._tokens[start : start + self._length + 1]
        scored_before = self._length - self._stride if index else 0
        return ScoredText(window[: scored_before + 1], window[scored_before + 1 :])
