"""The order of GPT samples: which tokens sample i covers, as Megatron (mid 2023) has it.

The documents of one split, repeated for as many epochs as the wanted samples need and shuffled,
form one stream of tokens. Sample i covers the s + 1 tokens from token i * s of the stream on, so
that neighbours share one token; a shuffle of the sample numbers decides when each is seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# A last epoch of which less than this share is needed is shuffled on its own, behind the others.
SEPARATE_LAST_EPOCH_BELOW = 0.80
_DOCUMENTS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class EpochPlan:
    """How often the documents are read to give the wanted samples."""

    epochs: int
    total_samples: int
    """Samples in all epochs together; at least as many as wanted."""
    separate_from: int | None
    """First sample of a last epoch that is shuffled on its own; None when it is not separate."""


@dataclass(frozen=True)
class GPTIndex:
    """Where every sample lies."""

    document_index: npt.NDArray[np.integer]
    """Sequence numbers in reading order, int32[epochs * documents] (int64 from 2**31 sequences)."""
    sample_index: npt.NDArray[np.integer]
    """Row i: position in document_index, and offset there, of the first token of sample i; int32
    (int64 from 2**31 positions) [samples + 1, 2]. Row i + 1 is the last token of sample i."""
    shuffle_index: npt.NDArray[np.integer]
    """Sample to read as the i-th, uint32[samples] (int64 from 2**32 - 2 samples)."""


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


def build_gpt_index(
    sequence_lengths: npt.NDArray[np.int32],
    documents: range,
    seq_length: int,
    num_samples: int,
    seed: int,
) -> GPTIndex:
    """Build the three indices for the sequences `documents` (a range of numbers, step 1).

    Memory beyond the result: the shuffles work in place, the rest goes by blocks of documents.

    Args:
        sequence_lengths: tokens in each sequence of the whole file, int32[n].
        documents: the sequences of this split.
        seq_length: tokens a sample feeds to the model (s); a sample has s + 1.
        num_samples: samples wanted; at least 1.
        seed: of the shuffles.

    Raises:
        ValueError: the documents hold no tokens.
    """
    lengths = sequence_lengths[documents.start : documents.stop]
    plan = plan_epochs(int(lengths.sum(dtype=np.int64)), seq_length, num_samples)
    rng = np.random.RandomState(seed)
    document_index = _document_index(documents, plan, rng)
    sample_index = _sample_index(sequence_lengths, document_index, seq_length, plan.total_samples)
    shuffle_index = _shuffle_index(plan, rng)
    return GPTIndex(document_index, sample_index, shuffle_index)


def _document_index(documents: range, plan: EpochPlan, rng: np.random.RandomState) -> np.ndarray:
    dtype = np.int32 if documents.stop <= np.iinfo(np.int32).max else np.int64
    index = np.tile(np.arange(documents.start, documents.stop, dtype=dtype), plan.epochs)
    if plan.separate_from is None:
        rng.shuffle(index)
    else:
        last_epoch = len(index) - len(documents)
        rng.shuffle(index[:last_epoch])
        rng.shuffle(index[last_epoch:])
    return index


def _sample_index(
    sequence_lengths: np.ndarray, document_index: np.ndarray, seq_length: int, samples: int
) -> np.ndarray:
    dtype = np.int32 if len(document_index) <= np.iinfo(np.int32).max else np.int64
    index = np.empty((samples + 1, 2), dtype)
    row, tokens_before = 0, 0
    for start in range(0, len(document_index), _DOCUMENTS_AT_ONCE):
        lengths = sequence_lengths[document_index[start : start + _DOCUMENTS_AT_ONCE]]
        ends = tokens_before + np.cumsum(lengths, dtype=np.int64)
        # Rows whose token i * s lies before the end of this block.
        stop = min(-(-int(ends[-1]) // seq_length), samples + 1)
        first_tokens = np.arange(row, stop, dtype=np.int64) * seq_length
        position = np.searchsorted(ends, first_tokens, side="right")
        index[row:stop, 0] = start + position
        index[row:stop, 1] = first_tokens - (ends[position] - lengths[position])
        row, tokens_before = stop, int(ends[-1])
    assert row == samples + 1
    return index


def _shuffle_index(plan: EpochPlan, rng: np.random.RandomState) -> np.ndarray:
    dtype = np.int64 if plan.total_samples >= np.iinfo(np.uint32).max - 1 else np.uint32
    index = np.arange(plan.total_samples, dtype=dtype)
    if plan.separate_from is None:
        rng.shuffle(index)
    else:
        rng.shuffle(index[: plan.separate_from])
        rng.shuffle(index[plan.separate_from :])
    return index
