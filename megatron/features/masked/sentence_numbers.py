"""Numbering of the sentences of documents, so that none is empty or exceeds a length limit.

A sentence is normally one sequence of the documents. Empty sequences are left out, and a sequence
that is longer than a sample counts as several sentences, so that text that was not split into
sentences is still read completely.

Shape suffixes: N sentences, D documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.data.samples import Documents, Piece

EXCEPTIONS = ("exceptions", "exception_starts", "exception_counts")


class SentenceNumbers(NamedTuple):
    """Compact mapping from sentence numbers to token ranges, which stores only exceptions."""

    first_sequence: int
    """Index of the documents' first sequence."""
    limit: int
    """Maximum number of tokens of a sentence."""
    exceptions: npt.NDArray[np.int64]
    """Sequences that are empty or count as several sentences, ascending: [X]."""
    exception_starts: npt.NDArray[np.int64]
    """Number of the first sentence at or after each exception: [X]."""
    exception_counts: npt.NDArray[np.int64]
    """Number of sentences of each exception: [X]."""

    def arrays(self) -> dict[str, npt.NDArray[np.int64]]:
        return {name: getattr(self, name) for name in EXCEPTIONS}

    def pieces(self, documents: Documents, start: int, stop: int) -> list[Piece]:
        """Return the document spans that contain the sentences `start` to `stop` - 1, in order."""
        sentences = np.arange(start, stop)
        sequences, parts = self._locate(sentences)
        pieces: list[Piece] = []
        lengths = documents.sequence_lengths[sequences]
        for sequence, part, length in zip(
            sequences.tolist(), parts.tolist(), lengths.tolist(), strict=True
        ):
            first, last = part * self.limit, min((part + 1) * self.limit, length)
            if pieces and pieces[-1].sequence == sequence:
                pieces[-1] = pieces[-1]._replace(stop=last)
            else:
                pieces.append(Piece(documents.prefix, sequence, first, last))
        return pieces

    def _locate(self, sentences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if not len(self.exceptions):
            return self.first_sequence + sentences, np.zeros_like(sentences)
        # Find the last exception that starts at or before the sentence. Either it contains the
        # sentence, or the sentence is found by counting sequences from the exception.
        x = np.searchsorted(self.exception_starts, sentences, side="right") - 1
        before_all = x < 0
        x = np.maximum(x, 0)
        part = sentences - self.exception_starts[x]
        after = part - self.exception_counts[x]
        sequence = self.exceptions[x] + np.maximum(after + 1, 0)
        part = np.where(after >= 0, 0, part)
        sequence = np.where(before_all, self.first_sequence + sentences, sequence)
        return sequence, np.where(before_all, 0, part)


class Sentences(NamedTuple):
    """Sentences of some documents, from which samples are made."""

    numbers: SentenceNumbers
    starts_N: npt.NDArray[np.int64]
    """Token offset of the start of each sentence, followed by the total: int64[N + 1]."""
    document_starts_D: npt.NDArray[np.int64]
    """Number of the first sentence of each document, followed by the total: int64[D + 1]."""

    @classmethod
    def of(cls, documents: Documents, units: range, limit: int) -> Sentences:
        """Number the sentences of the documents `units`, with at most `limit` tokens each."""
        boundaries = documents.document_indices[units.start : units.stop + 1]
        first, last = int(boundaries[0]), int(boundaries[-1])
        lengths = documents.sequence_lengths[first:last]
        counts = -(-lengths // limit)
        exceptions = np.flatnonzero(counts != 1)
        document_starts = boundaries - first
        exception_starts = exceptions
        if len(exceptions):
            starts = _starts(counts)
            document_starts = starts[document_starts]
            exception_starts = starts[exceptions]
            del starts
            lengths = _split(lengths, counts, limit)
        numbers = SentenceNumbers(
            first, limit, first + exceptions, exception_starts, counts[exceptions].astype(np.int64)
        )
        return cls(numbers, _starts(lengths), document_starts)


def join(documents: Documents, pieces: Sequence[Piece]) -> npt.NDArray[np.int64]:
    tokens = [documents.get(p.sequence, p.start, p.stop - p.start) for p in pieces]
    return np.concatenate(tokens).astype(np.int64) if tokens else np.empty(0, np.int64)


def token_count(pieces: Sequence[Piece]) -> int:
    return sum(piece.stop - piece.start for piece in pieces)


def trimmed(pieces: Sequence[Piece], front: int, back: int) -> list[Piece]:
    """Return document spans without the first `front` and last `back` tokens."""
    kept = []
    position, end = 0, token_count(pieces) - back
    for piece in pieces:
        start = piece.start + max(front - position, 0)
        stop = min(piece.stop, piece.start + end - position)
        if start < stop:
            kept.append(piece._replace(start=start, stop=stop))
        position += piece.stop - piece.start
    return kept


def _starts(counts: np.ndarray) -> npt.NDArray[np.int64]:
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, dtype=np.int64, out=starts[1:])
    return starts


def _split(lengths: np.ndarray, counts: np.ndarray, limit: int) -> np.ndarray:
    """Return the sentence lengths of sequences that count as `counts` sentences each. The last
    sentence of a sequence has the remaining tokens, all others `limit`."""
    split = np.full(int(counts.sum(dtype=np.int64)), limit, np.int32)
    ends = np.cumsum(counts, dtype=np.int64)
    some = counts > 0
    split[ends[some] - 1] = lengths[some] - (counts[some] - 1) * limit
    return split
