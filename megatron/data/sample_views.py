"""Samples as people read them: their text, and which of it counts in the loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.tokenizer import Tokenizer


class Segment(NamedTuple):
    """Consecutive text that counts in the loss, or does not."""

    text: str
    counted: bool


class SampleView(NamedTuple):
    """One sample, or a row of one that has several, as the model reads it, for people."""

    tokens_S: np.ndarray
    loss_mask_S: np.ndarray
    text: str
    """Its text; what the loss does not count is in [[double brackets]]."""
    segments: Sequence[Segment] = ()
    """The same in parts, where the text is that of the tokens."""
    name: str = ""
    """What the row is in its sample."""


def segments_of(
    tokenizer: Tokenizer, tokens: npt.NDArray[np.integer], counted: npt.NDArray[np.bool_]
) -> Iterator[Segment]:
    """The text of tokens, [n], in runs that count or do not."""
    changes = np.flatnonzero(np.diff(counted)) + 1
    for part in np.split(np.arange(len(tokens)), changes):
        if len(part):
            yield Segment(tokenizer.detokenize(tokens[part].tolist()), bool(counted[part[0]]))


def bracketed(segments: Sequence[Segment]) -> str:
    """Text with [[double brackets]] around what does not count; line breaks between documents stand
    alone."""
    return "".join(
        segment.text if segment.counted or segment.text == "\n" else f"[[{segment.text}]]"
        for segment in segments
    )
