"""Samples as people read them: their text, and which of it counts in the loss.

Shape suffix: S sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from megatron.data.samples import SampleView, Segment
from megatron.tokenizer import Tokenizer


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


def causal_view(
    tokenizer: Tokenizer,
    tokens_S: np.ndarray,
    labels_S: np.ndarray,
    loss_mask_S: np.ndarray,
    document_ids_S: np.ndarray | None,
    answers: bool,
) -> SampleView:
    """A row of which each token is predicted from those before it; documents that attention keeps
    apart are on separate lines. Of ``answers`` the last label is shown too."""
    starts = np.empty(0, np.int64)
    if document_ids_S is not None:
        starts = np.flatnonzero(np.diff(document_ids_S)) + 1
    # Position i of the mask is about token i + 1; the first token ends the previous sample.
    predicted_S = np.concatenate((loss_mask_S[:1], loss_mask_S[:-1])) > 0
    shown_S = tokens_S
    if answers and loss_mask_S[-1] > 0:
        # The end of the last answer is predicted, and never read.
        shown_S = np.append(tokens_S, labels_S[-1])
        predicted_S = np.append(predicted_S, True)
    segments: list[Segment] = []
    for tokens, predicted in zip(
        np.split(shown_S, starts), np.split(predicted_S, starts), strict=True
    ):
        segments += [Segment("\n", False)] * bool(segments)
        segments += segments_of(tokenizer, tokens, predicted)
    return SampleView(tokens_S, loss_mask_S, bracketed(segments), segments)
