"""The order of GPT samples: which tokens sample i covers, as Megatron (mid 2023) has it.

The documents of one split, repeated for as many epochs as the wanted samples need and shuffled,
form one stream of tokens. Sample i covers the s + 1 tokens from token i * s of the stream on, so
that neighbours share one token; a shuffle of the sample numbers decides when each is seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.data.array_file import Blocks
from megatron.data.index_cache import Layout
from megatron.data.shuffle import shuffle

# A last epoch of which less than this share is needed is shuffled on its own, behind the others.
SEPARATE_LAST_EPOCH_BELOW = 0.80
# Indices count in 32 bits where those are enough, as Megatron's do; from these numbers on in 64.
MOST_INT32 = 2**31 - 1
SAMPLES_IN_INT64 = 2**32 - 2
# What is worked on at once stays in a processor's cache: 4 times as fast as 2**22.
_DOCUMENTS_AT_ONCE = 1 << 15
_ROWS_AT_ONCE = 1 << 17


@dataclass(frozen=True)
class EpochPlan:
    """How often the documents are read to give the wanted samples."""

    epochs: int
    total_samples: int
    """Samples in all epochs together; at least as many as wanted."""
    separate_from: int | None
    """First sample of a last epoch that is shuffled on its own; None when it is not separate."""


def plan_epochs(tokens_per_epoch: int, seq_length: int, num_samples: int) -> EpochPlan:
    """The smallest number of epochs that gives `num_samples` samples of `seq_length` + 1 tokens.

    Raises:
        ValueError: there are no tokens.
    """
    if tokens_per_epoch <= 0:
        raise ValueError("the documents hold no tokens")

    def samples_in(tokens: int) -> int:
        return (tokens - 1) // seq_length  # neighbours share a token: one more than s * samples

    epochs = max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))
    total = samples_in(epochs * tokens_per_epoch)
    if epochs == 1:
        return EpochPlan(1, total, None)
    before_last = samples_in((epochs - 1) * tokens_per_epoch)
    threshold = int(SEPARATE_LAST_EPOCH_BELOW * samples_in(tokens_per_epoch))
    separate = num_samples - before_last < threshold
    return EpochPlan(epochs, total, before_last if separate else None)


@dataclass(frozen=True)
class GPTIndex:
    """Where every sample lies: three arrays, described by `layout` and made by `arrays`.

    document_index: sequence numbers in reading order, int32[epochs * documents] (int64 from 2**31
        sequences).
    sample_index: row i has the position in document_index, and the offset there, of the first token
        of sample i; int32 (int64 from 2**31 positions) [samples + 1, 2]. Row i + 1 is the last
        token of sample i.
    shuffle_index: sample to read as the i-th, uint32[samples] (int64 from 2**32 - 2 samples).
    """

    sequence_lengths: npt.NDArray[np.int32]
    """Tokens in each sequence of the whole file, int32[n]."""
    documents: range
    """The sequences of this split, step 1."""
    seq_length: int
    """Tokens a sample feeds to the model (s); a sample has s + 1."""
    seed: int
    """Of the shuffles."""
    plan: EpochPlan

    @classmethod
    def of(
        cls,
        sequence_lengths: npt.NDArray[np.int32],
        documents: range,
        seq_length: int,
        num_samples: int,
        seed: int,
    ) -> GPTIndex:
        """The index that has at least `num_samples` samples, of 1 or more.

        Raises:
            ValueError: the documents hold no tokens.
        """
        lengths = sequence_lengths[documents.start : documents.stop]
        plan = plan_epochs(int(lengths.sum(dtype=np.int64)), seq_length, num_samples)
        return cls(sequence_lengths, documents, seq_length, seed, plan)

    @property
    def layout(self) -> Layout:
        """Dtype and shape of the arrays, by name."""
        positions = self.plan.epochs * len(self.documents)
        samples = self.plan.total_samples
        numbers = np.int32 if self.documents.stop <= MOST_INT32 else np.int64
        rows = np.int32 if positions <= MOST_INT32 else np.int64
        order = np.int64 if samples >= SAMPLES_IN_INT64 else np.uint32
        return {
            "document_index": (np.dtype(numbers), (positions,)),
            "sample_index": (np.dtype(rows), (samples + 1, 2)),
            "shuffle_index": (np.dtype(order), (samples,)),
        }

    def arrays(self) -> Iterator[tuple[str, np.ndarray | Blocks]]:
        """The arrays, one after the other: the larger of document_index and shuffle_index is what
        memory has to hold."""
        rng = np.random.RandomState(self.seed)
        document_index = self._document_index(rng)
        yield "document_index", document_index
        dtype, shape = self.layout["sample_index"]
        yield "sample_index", Blocks(dtype, shape, self._sample_index(document_index, dtype))
        del document_index
        yield "shuffle_index", self._shuffle_index(rng)

    def _document_index(self, rng: np.random.RandomState) -> np.ndarray:
        dtype, shape = self.layout["document_index"]
        index = np.empty(shape, dtype)
        epochs, first = index.reshape(self.plan.epochs, -1), self.documents.start
        for start in range(0, len(self.documents), _ROWS_AT_ONCE):
            stop = min(start + _ROWS_AT_ONCE, len(self.documents))
            epochs[:, start:stop] = np.arange(first + start, first + stop, dtype=dtype)
        if self.plan.separate_from is None:
            shuffle(rng, index)
        else:
            last_epoch = len(index) - len(self.documents)
            shuffle(rng, index[:last_epoch])
            shuffle(rng, index[last_epoch:])
        return index

    def _sample_index(self, document_index: np.ndarray, dtype: np.dtype) -> Iterator[np.ndarray]:
        """Blocks of rows, in order."""
        s, rows = self.seq_length, self.plan.total_samples + 1
        most = max(1, _ROWS_AT_ONCE * len(document_index) // rows)
        at_once = min(_DOCUMENTS_AT_ONCE, most)
        row, tokens_before = 0, 0
        for start in range(0, len(document_index), at_once):
            lengths = self.sequence_lengths[document_index[start : start + at_once]]
            ends = np.cumsum(lengths, dtype=np.int64)
            ends += tokens_before
            # Row r belongs to the document in which token r * s lies: of a document that ends in
            # front of token e, to those up to ceil(e / s), less those of the ones before.
            rows_up_to = np.minimum(-(-ends // s), rows)
            position = np.repeat(np.arange(len(ends)), np.diff(rows_up_to, prepend=row))
            stop = int(rows_up_to[-1])
            block = np.empty((stop - row, 2), dtype)
            np.add(position, start, out=block[:, 0], casting="same_kind")
            first_tokens = np.arange(row, stop, dtype=np.int64)
            first_tokens *= s
            first_tokens -= ends[position]
            first_tokens += lengths[position]
            block[:, 1] = first_tokens
            yield block
            row, tokens_before = stop, int(ends[-1])
        assert row == rows

    def _shuffle_index(self, rng: np.random.RandomState) -> np.ndarray:
        dtype, shape = self.layout["shuffle_index"]
        index = np.arange(shape[0], dtype=dtype)
        if self.plan.separate_from is None:
            shuffle(rng, index)
        else:
            shuffle(rng, index[: self.plan.separate_from])
            shuffle(rng, index[self.plan.separate_from :])
        return index
