"""GPT samples, in Megatron's order (mid 2023): S + 1 tokens each from one stream of documents.

The documents of one split are repeated for as many epochs as needed, shuffled, and concatenated
into one stream of tokens. Sample i has the s + 1 tokens that start at token i * s, so neighbouring
samples share one token. A shuffle of the sample indices determines the order of reading.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.index_cache import Blocks, IndexCache, Layout, StoredArrays, find_numba
from megatron.data.samples import TRAINING, Documents, Piece, check_ids, checked_index

# For shorter arrays, compiling with numba takes longer than shuffling.
_WORTH_COMPILING = 1 << 25
_DRAWN_AT_ONCE = 1 << 16


def shuffle(rng: np.random.RandomState, array: np.ndarray) -> None:
    """Shuffle a contiguous 1-D array in place; array and `rng` end as after rng.shuffle(array)."""
    worth = _WORTH_COMPILING <= len(array) <= 1 << 32  # above, NumPy draws 64-bit numbers
    numba = find_numba() if worth else None
    if numba is None:
        rng.shuffle(array)
        return
    draw, swap = _compiled(numba)
    generator: Any = np.random.MT19937()
    before: Any = rng.get_state(legacy=False)
    state = before
    chosen = np.empty(_DRAWN_AT_ONCE, np.uint32)
    last = len(array) - 1
    while last >= 1:
        generator.state = state
        numbers = generator.random_raw(_DRAWN_AT_ONCE)
        used, count = draw(numbers, last, chosen)
        swap(array, last, chosen[:count])
        last -= count
        if used == len(numbers):
            state = generator.state
        else:  # last pass
            generator.state = state
            generator.random_raw(used, output=False)
            state = generator.state
    rng.set_state({**before, "state": state["state"]})


@functools.cache
def _compiled(numba: ModuleType) -> tuple[Callable[..., tuple[int, int]], Callable[..., None]]:
    return numba.njit(_draw), numba.njit(_swap)


def _draw(numbers: np.ndarray, last: int, chosen: np.ndarray) -> tuple[int, int]:
    """Fill `chosen` with the swap partners j of i = last, last - 1, ... Return the number of random
    numbers consumed and the number of partners drawn."""
    used, count, i = 0, 0, last
    mask = np.uint64(0)
    while i >= 1 and used < len(numbers):
        while mask < np.uint64(i):
            mask = (mask << np.uint64(1)) | np.uint64(1)
        while np.uint64(i) <= (mask >> np.uint64(1)):
            mask >>= np.uint64(1)
        j = numbers[used] & mask
        used += 1
        if j <= np.uint64(i):
            chosen[count] = j
            count += 1
            i -= 1
    return used, count


def _swap(array: np.ndarray, last: int, chosen: np.ndarray) -> None:
    i = last
    for j in chosen:
        kept = array[i]
        array[i] = array[j]
        array[j] = kept
        i -= 1


# Part of each cache entry's name. Increment it when the meaning of the arrays changes.
INDEX_VERSION = 1
# The last epoch is shuffled separately if less than this fraction of it is needed.
SEPARATE_LAST_EPOCH_BELOW = 0.80
# Limits up to which values are stored in 32 bits, as in Megatron; larger ones need 64 bits.
MOST_INT32 = 2**31 - 1
SAMPLES_IN_INT64 = 2**32 - 2
# Block sizes that fit into CPU caches: 4 times as fast as 2**22.
_DOCUMENTS_AT_ONCE = 1 << 15
_ROWS_AT_ONCE = 1 << 17
MEAN_MOCK_DOCUMENT = 64


@dataclass(frozen=True)
class GPTRecipe:
    """Recipe for samples of seq_length + 1 tokens in Megatron's order. As in Megatron, every
    sequence in a file is treated as a document."""

    seq_length: int
    """Number of input tokens per sample."""
    seed: int
    """Seed of the shuffles."""
    vocab_size: int | None = None
    """Upper bound (exclusive) on the token ids in samples; None if they are not checked."""
    exact_epochs: int | None = None
    """Number of epochs of training samples, whatever number is requested; None to derive it."""

    def units(self, documents: Documents) -> int:
        return len(documents)

    def build(
        self, documents: Documents, units: range, num_samples: int, name: str, cache: IndexCache
    ) -> GPTDataset:
        """Return at least `num_samples` samples from the sequences `units`; see
        `SampleRecipe.build`. Raises ValueError if the documents have no tokens, their index is
        damaged, or the sample index would not fit into memory."""
        lengths = documents.sequence_lengths
        if not lengths[units.start : units.stop].any():
            raise ValueError(
                f"{documents.prefix}: the {len(units)} documents for {name} have no tokens"
            )
        epochs = self.exact_epochs if name == TRAINING else None
        depends_on = {
            "version": INDEX_VERSION,
            "sequence lengths": documents.lengths_digest,
            "documents": [units.start, units.stop],
            "seq length": self.seq_length,
            **({"samples": num_samples} if epochs is None else {"epochs": epochs}),
            "seed": self.seed,
        }
        index = GPTIndex.of(lengths, units, self.seq_length, num_samples, self.seed, epochs)
        samples = index.plan.total_samples
        if samples < 1:
            raise ValueError(
                f"{documents.prefix}: {epochs} epochs of the {len(units)} documents for {name} "
                f"have fewer tokens than a sample, {self.seq_length + 1}"
            )

        def arrays() -> Iterator[tuple[str, np.ndarray | Blocks]]:
            documents.verify()
            needed, memory = index.memory, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            if needed > memory:
                raise ValueError(
                    f"{documents.prefix}: the index of {samples:,} samples for {name} takes "
                    f"{needed >> 30:,} GiB while it is built, and this machine has "
                    f"{memory >> 30:,} GiB of memory; train on fewer samples, or on larger "
                    "documents"
                )
            return index.arrays()

        stored = cache.arrays(f"gpt-{name}", depends_on, arrays, index.layout)
        return GPTDataset(documents, self.seq_length, stored, self.vocab_size)


class GPTDataset:
    """Samples of seq_length + 1 tokens, int64[S + 1], built by `GPTRecipe.build`."""

    def __init__(
        self,
        documents: Documents,
        seq_length: int,
        index: StoredArrays,
        vocab_size: int | None = None,
    ) -> None:
        self.documents = documents
        self.seq_length, self.vocab_size = seq_length, vocab_size
        self._index = index

    def __len__(self) -> int:
        return len(self._index["shuffle_index"])

    def __getitem__(self, index: int, /) -> np.ndarray:
        index = checked_index(index, len(self))
        tokens_T = np.empty(self.seq_length + 1, np.int64)
        filled = 0
        for sequence, start, length in self._parts(index):
            tokens_T[filled : filled + length] = self.documents.get(sequence, start, length)
            filled += length
        if self.vocab_size is not None:
            check_ids(tokens_T, self.vocab_size, index, self.origin)
        return tokens_T

    def origin(self, index: int, /) -> list[Piece]:
        """Return the documents and offsets of sample `index`, in the order of its tokens."""
        index = checked_index(index, len(self))
        return [
            Piece(self.documents.prefix, sequence, start, start + length)
            for sequence, start, length in self._parts(index)
        ]

    def _parts(self, index: int) -> list[tuple[int, int, int]]:
        """Return (sequence, first token, number of tokens) for each sequence that a sample uses.
        Raises ValueError if the index is damaged, as opening checks only some entries."""
        samples, order = self._index["sample_index"], self._index["document_index"]
        lengths = self.documents.sequence_lengths
        row = int(self._index["shuffle_index"][index])
        parts, wanted = [], self.seq_length + 1
        if 0 <= row < len(samples) - 1:
            (position, start), (last, stop) = samples[row].tolist(), samples[row + 1].tolist()
            while wanted > 0 and 0 <= position <= last < len(order):
                sequence = int(order[position])
                if not 0 <= sequence < len(lengths):
                    break
                end = stop + 1 if position == last else int(lengths[sequence])
                if not 0 <= start <= end <= lengths[sequence]:
                    break
                if end > start:
                    parts.append((sequence, start, end - start))
                wanted -= end - start
                position, start = position + 1, 0
                if position > last and wanted == 0:
                    return parts
        raise self._index.damaged(f"sample {index} does not have {self.seq_length + 1} tokens")


@dataclass(frozen=True)
class EpochPlan:
    """Number of passes over the documents, and the samples that they contain."""

    epochs: int
    total_samples: int
    """Number of samples in all epochs, at least the requested number unless epochs are exact."""
    separate_from: int | None
    """Index of the last epoch's first sample if that epoch is shuffled separately, else None."""


def plan_epochs(
    tokens_per_epoch: int, seq_length: int, num_samples: int, exact_epochs: int | None = None
) -> EpochPlan:
    """Return the plan with the fewest epochs that contain `num_samples` samples, or with exactly
    `exact_epochs`, all shuffled together. Raises ValueError if there are no tokens."""
    if tokens_per_epoch <= 0:
        raise ValueError("the documents have no tokens")

    def samples_in(tokens: int) -> int:
        return (tokens - 1) // seq_length  # neighbours share a token: n samples need s * n + 1

    if exact_epochs is not None:
        return EpochPlan(exact_epochs, samples_in(exact_epochs * tokens_per_epoch), None)
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
    """Three arrays that locate every sample's tokens, described by `layout`, built by `arrays`.

    document_index: sequence numbers in reading order, int32[epochs * documents] (int64 from 2**31
        sequences).
    sample_index: row i has the position in document_index, and the offset in that document, of the
        first token of sample i; int32 (int64 from 2**31 positions) [samples + 1, 2]. Row i + 1 is
        the last token of sample i.
    shuffle_index: entry i is the index of the i-th sample to read, uint32[samples] (int64 from
        2**32 - 2 samples).
    """

    sequence_lengths: npt.NDArray[np.int32]
    """Number of tokens in each sequence of the whole file, int32[n]."""
    documents: range
    """Range of the split's sequences, with step 1."""
    seq_length: int
    seed: int
    plan: EpochPlan

    @classmethod
    def of(
        cls,
        sequence_lengths: npt.NDArray[np.int32],
        documents: range,
        seq_length: int,
        num_samples: int,
        seed: int,
        exact_epochs: int | None = None,
    ) -> GPTIndex:
        """Return an index with at least `num_samples` >= 1 samples, or with all samples in
        `exact_epochs` epochs. Raises ValueError if there are no tokens."""
        lengths = sequence_lengths[documents.start : documents.stop]
        plan = plan_epochs(int(lengths.sum(dtype=np.int64)), seq_length, num_samples, exact_epochs)
        return cls(sequence_lengths, documents, seq_length, seed, plan)

    @property
    def layout(self) -> Layout:
        """Dtype and shape of each array, by name."""
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

    @property
    def memory(self) -> int:
        """Peak memory of `arrays` in bytes: the larger of document_index and shuffle_index."""
        layout = self.layout
        return max(
            dtype.itemsize * math.prod(shape)
            for dtype, shape in (layout["document_index"], layout["shuffle_index"])
        )

    def arrays(self) -> Iterator[tuple[str, np.ndarray | Blocks]]:
        """Yield the arrays by name, one at a time. Needs `memory` bytes."""
        rng = np.random.RandomState(self.seed)
        document_index = self._document_index(rng)
        yield "document_index", document_index
        dtype, shape = self.layout["sample_index"]
        yield "sample_index", Blocks(dtype, shape, self._sample_index(document_index, dtype))
        del document_index
        dtype, shape = self.layout["shuffle_index"]
        shuffle_index = np.arange(shape[0], dtype=dtype)
        _shuffle_parts(rng, shuffle_index, self.plan.separate_from)
        yield "shuffle_index", shuffle_index

    def _document_index(self, rng: np.random.RandomState) -> np.ndarray:
        dtype, shape = self.layout["document_index"]
        index = np.empty(shape, dtype)
        epochs, first = index.reshape(self.plan.epochs, -1), self.documents.start
        for start in range(0, len(self.documents), _ROWS_AT_ONCE):
            stop = min(start + _ROWS_AT_ONCE, len(self.documents))
            epochs[:, start:stop] = np.arange(first + start, first + stop, dtype=dtype)
        separate = self.plan.separate_from is not None
        _shuffle_parts(rng, index, len(index) - len(self.documents) if separate else None)
        return index

    def _sample_index(self, document_index: np.ndarray, dtype: np.dtype) -> Iterator[np.ndarray]:
        s, rows = self.seq_length, self.plan.total_samples + 1
        most = max(1, _ROWS_AT_ONCE * len(document_index) // rows)
        at_once = min(_DOCUMENTS_AT_ONCE, most)
        row, tokens_before = 0, 0
        for start in range(0, len(document_index), at_once):
            lengths = self.sequence_lengths[document_index[start : start + at_once]]
            ends = np.cumsum(lengths, dtype=np.int64)
            ends += tokens_before
            # Row r belongs to the document that contains token r * s. The documents up to one that
            # ends before token e have the first ceil(e / s) rows.
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


def _shuffle_parts(rng: np.random.RandomState, index: np.ndarray, boundary: int | None) -> None:
    """Shuffle an array in place; with a `boundary`, separately before and after it."""
    parts = [index] if boundary is None else [index[:boundary], index[boundary:]]
    for part in parts:
        shuffle(rng, part)


@dataclass(frozen=True)
class MockGPTDataset:
    """Synthetic samples for `--mock-data`. Sample i is a function of (seed, part, i) only. It
    consists of short documents. Each counts upwards (modulo the vocabulary size) from a random
    token and ends with `eod_token`, so that the loss falls within a few steps."""

    num_samples: int
    seq_length: int
    vocab_size: int
    seed: int
    part: int = 0
    """Index of the split: 0 training, 1 validation, 2 test. Splits share no samples."""
    eod_token: int | None = None

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int, /) -> np.ndarray:
        rng = np.random.default_rng([self.seed, self.part, checked_index(index, len(self))])
        length = self.seq_length + 1
        ends = rng.random(length) < 1 / MEAN_MOCK_DOCUMENT
        document = np.cumsum(ends, dtype=np.int64) - ends  # an end is in the document that it ends
        first_tokens = rng.integers(self.vocab_size, size=document[-1] + 1)
        tokens = (first_tokens[document] + np.arange(length)) % self.vocab_size
        if self.eod_token is not None:
            tokens[ends] = self.eod_token
        return tokens.astype(np.int64)

    def origin(self, index: int, /) -> list[Piece]:
        return [Piece("--mock-data", index, 0, self.seq_length + 1)]
