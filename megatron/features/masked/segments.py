"""Index of BERT's and T5's datasets: the sentences of each sample.

In an epoch, every document is read from its first sentence. A sample has a target length, usually
the maximum: it takes sentences until it has that many tokens, or the document ends. Tokens beyond
the maximum length are cut off when the sample is read. In a pair, the sentences are divided between
segments A and B at random. With next-sentence prediction, half of the pairs take B from another
document. The original document then continues after A, so that no sentence is lost (Devlin et al.
2018, arXiv:1810.04805, appendix A.2 and their create_pretraining_data.py).

Documents are processed in rounds. Each makes the next sample of every unfinished document with a
few array operations.

Shape suffixes: N sentences, D documents, R documents for which a round makes a sample.
"""

from __future__ import annotations

import logging
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from megatron.data.gpt_batch import best_fit
from megatron.data.index_cache import IndexCache, StoredArrays
from megatron.data.samples import (
    TRAINING,
    Documents,
    Piece,
    SampleDataset,
    check_ids,
    checked_index,
)
from megatron.features.masked.sentence_numbers import (
    EXCEPTIONS,
    SentenceNumbers,
    Sentences,
    join,
    token_count,
    trimmed,
)
from megatron.util.digests import digest

logger = logging.getLogger(__name__)

Pairs = Literal["none", "sentence-order", "next-sentence"]
SHORTEST = 2
"""Minimum target length of a sample, in tokens."""
# Version of the index, part of each cache key. Increment it when the arrays change.
INDEX_VERSION = 1
_EPOCHS, _SAMPLES = 0, 1


def epoch_rng(seed: int, part: str, epoch: int) -> np.random.Generator:
    """Return the random generator of an epoch. `part` is the split: "train", "valid" or "test"."""
    return np.random.default_rng([seed, zlib.crc32(part.encode()), _EPOCHS, epoch])


def sample_rng(seed: int, part: str, index: int) -> np.random.Generator:
    """Return the random generator for the contents of sample `index`: cuts, masks and spans."""
    return np.random.default_rng([seed, zlib.crc32(part.encode()), _SAMPLES, index])


@dataclass(frozen=True)
class SegmentRules:
    max_tokens: int
    """Maximum length in tokens, without special tokens."""
    short_seq_prob: float
    """Fraction of samples with a target length drawn uniformly from SHORTEST to `max_tokens`."""
    pairs: Pairs
    """Relation between the two segments of a sample; "none" for samples of one segment."""

    @property
    def min_sentences(self) -> int:
        return 1 if self.pairs == "none" else 2

    @property
    def columns(self) -> int:
        """Number of columns of the index: start and stop sentence of A and, in pairs, of B."""
        return 2 if self.pairs == "none" else 4


def build_segments(
    sentences: Sentences,
    rules: SegmentRules,
    num_samples: int,
    seed: int,
    part: str,
    source: str,
    exact_epochs: int | None = None,
) -> npt.NDArray[np.integer]:
    """Return the sentences of every sample, in the order in which samples are read. Sample i does
    not depend on ``num_samples``. If ``exact_epochs`` is given, it replaces ``num_samples``: the
    result contains all samples of that many epochs.

    The result is int32[num_samples, columns] (int64 from 2**31 sentences): start and stop sentence
    of segment A, then of B. Raises ValueError if no sample can be made from the documents.
    """
    epochs = _Epochs(sentences, rules, seed, part, source)
    size = num_samples if exact_epochs is None else 0
    index: np.ndarray = np.empty((size, rules.columns), epochs.dtype)
    filled = 0
    while filled < num_samples if exact_epochs is None else epochs.count < exact_epochs:
        rows, rng = epochs.next()
        if exact_epochs is not None:
            index.resize((filled + len(rows), rules.columns), refcheck=False)
        order = rng.permutation(len(rows))[: len(index) - filled]
        index[filled : filled + len(order)] = rows[order]
        filled += len(order)
    epochs.report(filled)
    return index


def build_packed_segments(
    sentences: Sentences,
    rules: SegmentRules,
    num_rows: int,
    seed: int,
    part: str,
    source: str,
    capacity: int,
    exact_epochs: int | None = None,
) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.int64]]:
    """Return the sentences of samples that are packed whole into rows of `capacity` tokens, epoch
    by epoch, for at least `num_rows` rows. Also return the index of the first sample of each row,
    followed by the number of samples, int64[rows + 1]. See :func:`build_segments`."""
    epochs = _Epochs(sentences, rules, seed, part, source)
    special = capacity - rules.max_tokens
    samples: list[np.ndarray] = []
    sizes: list[np.ndarray] = []
    filled = tokens = 0
    while filled < num_rows if exact_epochs is None else epochs.count < exact_epochs:
        rows, rng = epochs.next()
        starts = sentences.starts_N[rows]
        lengths = np.minimum(starts[:, 1] - starts[:, 0], rules.max_tokens) + special
        order = rng.permutation(len(rows))
        packed = best_fit(lengths, order, capacity)
        # Shuffle the rows, because the rows that are filled last have the most padding.
        packed = rng.permutation(packed.max() + 1)[packed]
        samples.append(rows[order[np.argsort(packed, kind="stable")]])
        sizes.append(np.bincount(packed))
        filled += len(sizes[-1])
        tokens += int(lengths.sum())
    bounds = np.cumsum(np.concatenate([np.zeros(1, np.int64), *sizes]))
    epochs.report(int(bounds[-1]))
    share = 100 * (1 - tokens / (filled * capacity))
    logger.info("%s: packed into %d rows, %.1f %% of their tokens padding", source, filled, share)
    return np.concatenate(samples), bounds


class _Epochs:
    """Samples of consecutive epochs."""

    def __init__(
        self, sentences: Sentences, rules: SegmentRules, seed: int, part: str, source: str
    ) -> None:
        self.sentences, self.rules, self.seed = sentences, rules, seed
        self.part, self.source, self.count = part, source, 0
        counts = np.diff(sentences.document_starts_D)
        self.usable = np.flatnonzero(counts >= rules.min_sentences)
        _check(sentences, rules, counts, len(self.usable), part, source)
        self.skipped = len(counts) - len(self.usable)
        total = len(sentences.starts_N) - 1
        self.dtype: type = np.int32 if total <= np.iinfo(np.int32).max else np.int64

    def next(self) -> tuple[np.ndarray, np.random.Generator]:
        """Return the next epoch's samples, unshuffled, and the random generator for their order."""
        rng = epoch_rng(self.seed, self.part, self.count)
        self.count += 1
        return _epoch(self.sentences, self.rules, self.usable, rng, self.dtype), rng

    def report(self, samples: int) -> None:
        left_out = (
            f"; {self.skipped} documents of fewer than {self.rules.min_sentences} sentences are "
            "left out"
        )
        logger.info(
            "%s: %d samples for %s of %d documents in %d epochs%s",
            self.source,
            samples,
            self.part,
            len(self.usable),
            self.count,
            left_out if self.skipped else "",
        )


def _epoch(
    sentences: Sentences,
    rules: SegmentRules,
    usable: np.ndarray,
    rng: np.random.Generator,
    dtype: type,
) -> np.ndarray:
    """Return the samples of one epoch, sorted by round and then by document."""
    tokens, bounds = sentences.starts_N, sentences.document_starts_D
    others = _OtherDocuments(sentences) if rules.pairs == "next-sentence" else None
    first, end = bounds[usable], bounds[usable + 1]
    documents = usable
    rounds = []
    while len(first):
        length = np.full(len(first), rules.max_tokens)
        short = rng.random(len(first)) < rules.short_seq_prob
        drawn = rng.integers(SHORTEST, rules.max_tokens, len(first), endpoint=True)
        np.copyto(length, drawn, where=short)
        stop = np.searchsorted(tokens, tokens[first] + length)
        stop = np.maximum(stop, first + rules.min_sentences)
        # If the remaining sentences are too few for another sample, they belong to this one.
        stop = np.where(end - stop < rules.min_sentences, end, stop)
        row: np.ndarray = np.empty((len(first), rules.columns), dtype)
        row[:, 0], row[:, 1] = first, stop
        following = stop
        if rules.pairs != "none":
            split = rng.integers(first + 1, stop)
            row[:, 1], row[:, 2], row[:, 3] = split, split, stop
            if others is not None:
                random = np.flatnonzero(rng.random(len(first)) < 0.5)
                missing = length - (tokens[split] - tokens[first])
                row[random, 2], row[random, 3] = others.draw(
                    documents[random], missing[random], rng
                )
                following = stop.copy()
                following[random] = split[random]
        rounds.append(row)
        # A single sentence left after a random second segment is skipped: it cannot form a pair.
        more = end - following >= rules.min_sentences
        first, end, documents = following[more], end[more], documents[more]
    return np.concatenate(rounds)


class _OtherDocuments:
    def __init__(self, sentences: Sentences) -> None:
        counts_D = np.diff(sentences.document_starts_D)
        filled = np.flatnonzero(counts_D)
        self._tokens = sentences.starts_N
        self._first, self._stop = (
            sentences.document_starts_D[filled],
            sentences.document_starts_D[filled + 1],
        )
        self._rank_D = np.cumsum(counts_D > 0) - 1

    def draw(
        self, documents: np.ndarray, missing: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw a range of sentences (start, stop) from another document for each of `documents`. It
        begins at a random sentence, has at least one, and extends until there are `missing` tokens
        or the document ends."""
        # Exclude the document itself: numbers from its own upwards are shifted by one.
        other = rng.integers(0, len(self._first) - 1, len(documents))
        other += other >= self._rank_D[documents]
        first = rng.integers(self._first[other], self._stop[other])
        stop = np.searchsorted(self._tokens, self._tokens[first] + np.maximum(missing, 1))
        return first, np.minimum(stop, self._stop[other])


# End of two error messages about documents that cannot form pairs.
_WITHOUT_PAIRS = (
    "preprocess the text with --split-sentences, or train without pairs (--bert-no-binary-head)"
)


def check_sentences(documents: Documents, rules: SegmentRules) -> None:
    """Raise ValueError if pairs are requested from a file whose documents are not split into
    sentences. Long documents would be cut at arbitrary tokens, and all others left out."""
    counts_D = np.diff(documents.document_indices)
    split = (counts_D > 1).any() or not documents.sequence_lengths.any()
    if rules.pairs != "none" and not split:
        raise ValueError(
            f"{documents.prefix}: none of the {len(counts_D)} documents is split into sentences, "
            f"and a pair needs {rules.min_sentences}: {_WITHOUT_PAIRS}"
        )


def _check(
    sentences: Sentences,
    rules: SegmentRules,
    counts: np.ndarray,
    usable: int,
    part: str,
    source: str,
) -> None:
    where = f"{source}: the {len(counts)} documents for {part}"
    if len(sentences.starts_N) == 1:
        raise ValueError(f"{where} have no tokens")
    if not usable:
        raise ValueError(
            f"{where} have one sentence each, and a pair needs {rules.min_sentences}: "
            f"{_WITHOUT_PAIRS}"
        )
    if rules.pairs == "next-sentence" and np.count_nonzero(counts) < 2:
        raise ValueError(
            f"{where} are only one document with text, and --bert-pair-task next-sentence takes "
            "half of its second segments from another one: add documents, or use sentence-order"
        )


Sample = TypeVar("Sample")


class SegmentRecipe(ABC, Generic[Sample]):
    """Recipe for samples of one or two segments, from documents that are split into sentences."""

    cache_name: ClassVar[str]
    seed: int
    exact_epochs: int | None
    """Number of epochs of the training set, regardless of the number of samples requested. None
    reads as many epochs as needed."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Exclusive upper bound on the token ids of documents."""

    @property
    @abstractmethod
    def rules(self) -> SegmentRules:
        """Rules by which sentences are combined into samples."""

    @abstractmethod
    def sample(
        self, texts: Sequence[npt.NDArray[np.int64]], is_random: bool, rng: np.random.Generator
    ) -> Sample:
        """Build a sample of one or two segments. ``is_random`` is True if the second segment does
        not follow the first."""

    @property
    def capacity(self) -> int | None:
        """Number of tokens of a row of packed samples, including special tokens; None without
        packing."""
        return None

    def packed(self, samples: Sequence[Sample]) -> Sample:
        """Pack the samples of one row into one sample."""
        raise AssertionError(f"{self} packs no samples")

    def units(self, documents: Documents) -> int:
        return len(documents.document_indices) - 1

    def build(
        self, documents: Documents, units: range, num_samples: int, name: str, cache: IndexCache
    ) -> SampleDataset[Sample]:
        """Build `num_samples` samples, or rows of packed samples, from the documents `units`; see
        `SampleRecipe.build`. Raises ValueError if no sample can be made from the documents."""
        rules, capacity = self.rules, self.capacity
        check_sentences(documents, rules)
        boundaries = documents.document_indices[units.start : units.stop + 1]
        epochs = self.exact_epochs if name == TRAINING else None
        depends_on = {
            "version": INDEX_VERSION,
            "sequence lengths": documents.lengths_digest,
            "documents": [units.start, units.stop],
            "document boundaries": digest(boundaries.tobytes()),
            "tokens": rules.max_tokens,
            "short sequences": rules.short_seq_prob,
            "pairs": rules.pairs,
            **({"samples": num_samples} if epochs is None else {"epochs": epochs}),
            "seed": self.seed,
            "part": name,
        }
        if capacity is not None:
            depends_on["packed"] = capacity

        def arrays() -> dict[str, np.ndarray]:
            documents.verify()
            sentences = Sentences.of(documents, units, rules.max_tokens)
            order = sentences, rules, num_samples, self.seed, name, documents.prefix
            if capacity is None:
                arrays_of_rows = {"segments": build_segments(*order, epochs)}
            else:
                segments, bounds = build_packed_segments(*order, capacity, epochs)
                arrays_of_rows = {"segments": segments, "bounds": bounds}
            return {**arrays_of_rows, **sentences.numbers.arrays()}

        index = cache.arrays(f"{self.cache_name}-{name}", depends_on, arrays)
        samples = SegmentDataset(documents, self, int(boundaries[0]), name, index)
        return samples if capacity is None else PackedRows(samples, index["bounds"])


class SegmentDataset(Generic[Sample]):
    """Dataset of samples, built by `SegmentRecipe.build`."""

    def __init__(
        self,
        documents: Documents,
        recipe: SegmentRecipe[Sample],
        first_sequence: int,
        name: str,
        index: StoredArrays,
    ) -> None:
        self.documents, self.recipe, self.name = documents, recipe, name
        self._rules = recipe.rules
        self._first_sequence = first_sequence
        self._index = index

    def __len__(self) -> int:
        return len(self._index["segments"])

    def __getitem__(self, index: int, /) -> Sample:
        segments, is_random, rng = self._segments(index)
        texts = [join(self.documents, pieces) for pieces in segments]
        check_ids(np.concatenate(texts), self.recipe.vocab_size, index, self.origin)
        return self.recipe.sample(texts, is_random, rng)

    def origin(self, index: int, /) -> list[Piece]:
        """Return the document spans that make up sample `index`, before masking."""
        return [piece for pieces in self._segments(index)[0] for piece in pieces]

    def _segments(self, index: int) -> tuple[list[list[Piece]], bool, np.random.Generator]:
        """Return the segments of a sample, whether the second does not follow the first, and the
        random generator that completes the sample."""
        index = checked_index(index, len(self))
        rng = sample_rng(self.recipe.seed, self.name, index)
        limit = self._rules.max_tokens
        exceptions = (self._index[name] for name in EXCEPTIONS)
        numbers = SentenceNumbers(self._first_sequence, limit, *exceptions)
        row = self._index["segments"][index].tolist()
        segments = [numbers.pieces(self.documents, *row[i : i + 2]) for i in range(0, len(row), 2)]
        is_random = False
        if self._rules.pairs == "next-sentence":
            is_random = row[2] != row[1]
        elif self._rules.pairs == "sentence-order":
            is_random = bool(rng.random() < 0.5)
            if is_random:
                segments.reverse()
        for i, cut in enumerate(surplus([token_count(pieces) for pieces in segments], limit)):
            if cut:
                # Each surplus token is cut off at the front or the back with equal probability.
                front = int(rng.binomial(cut, 0.5))
                segments[i] = trimmed(segments[i], front, cut - front)
        return segments, is_random, rng


class PackedRows(Generic[Sample]):
    """Dataset of rows of packed samples. `bounds` contains the index of the first sample of each
    row, followed by the number of samples."""

    def __init__(self, samples: SegmentDataset[Sample], bounds: npt.NDArray[np.int64]) -> None:
        self.samples, self._bounds = samples, bounds

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, index: int, /) -> Sample:
        return self.samples.recipe.packed([self.samples[i] for i in self._numbers(index)])

    def origin(self, index: int, /) -> list[Piece]:
        """Return the document spans of all samples in a row; see `SegmentDataset.origin`."""
        return [piece for i in self._numbers(index) for piece in self.samples.origin(i)]

    def _numbers(self, index: int) -> range:
        index = checked_index(index, len(self))
        return range(*self._bounds[index : index + 2].tolist())


def surplus(lengths: list[int], limit: int) -> list[int]:
    """Return the number of tokens to cut off each of one or two segments, so that they have at most
    `limit` tokens together. As in google-research/bert, one token at a time is cut off the longer
    segment, or off the second one if they are equally long."""
    excess = max(0, sum(lengths) - limit)
    if len(lengths) == 1:
        return [excess]
    first, second = lengths
    longer = min(excess, abs(first - second))
    of_both = excess - longer
    off_first = (longer if first > second else 0) + of_both // 2
    return [off_first, excess - off_first]
