"""The sentences of each sample: the index of BERT's and T5's datasets.

In an epoch every document is read from its first sentence on. A sample is made for a length,
usually the longest: it takes sentences until it has that many tokens, or the document ends. Tokens
beyond the longest length are cut off when the sample is read. In a pair the sentences are divided
between segments A and B at random; with next-sentence prediction, B is in half of the pairs taken
from another document instead, and the document continues after A, so that no sentence is lost
(Devlin et al. 2018, arXiv:1810.04805, appendix A.2 and their create_pretraining_data.py).

All documents are read in rounds, each of which makes the next sample of every unfinished document
with a few array operations.

Shape suffixes: N sentences, D documents, R documents that a round makes a sample of.
"""

from __future__ import annotations

import logging
import zlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from megatron.data.gpt_batch import best_fit
from megatron.data.samples import Documents
from megatron.features.masked.sentence_numbers import Sentences

logger = logging.getLogger(__name__)

Pairs = Literal["none", "sentence-order", "next-sentence"]
SHORTEST = 2
"""Tokens of the shortest length that a sample is made for."""
# Part of every cache entry's name: raise it when the meaning of the arrays changes.
INDEX_VERSION = 1
_EPOCHS, _SAMPLES = 0, 1


def epoch_rng(seed: int, part: str, epoch: int) -> np.random.Generator:
    """Random numbers for the samples of an epoch; `part` is "train", "valid" ..."""
    return np.random.default_rng([seed, zlib.crc32(part.encode()), _EPOCHS, epoch])


def sample_rng(seed: int, part: str, index: int) -> np.random.Generator:
    """Random numbers within sample `index`: cuts, masks, spans."""
    return np.random.default_rng([seed, zlib.crc32(part.encode()), _SAMPLES, index])


@dataclass(frozen=True)
class SegmentRules:
    max_tokens: int
    """Tokens of the longest length, without special tokens."""
    short_seq_prob: float
    """Share of samples that are made for a length drawn evenly from SHORTEST to `max_tokens`."""
    pairs: Pairs
    """Whether a sample is a pair of segments, and of which kind."""

    @property
    def min_sentences(self) -> int:
        return 1 if self.pairs == "none" else 2

    @property
    def columns(self) -> int:
        """Width of the index: first and stop sentence of A and, in pairs, of B."""
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
    """The sentences of every sample, in the order in which samples are read; sample i does not
    depend on how many are wanted. With ``exact_epochs`` all samples of so many epochs.

    int32[num_samples, columns] (int64 from 2**31 sentences): first and stop sentence of segment A,
    then those of B. Raises ValueError if no sample can be made from the documents.
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
    """The same where whole samples are packed into rows of `capacity` tokens, epoch by epoch, for
    at least `num_rows` rows; also the first sample of each row, and of the end: int64[rows + 1]."""
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
        # Rows that are filled last have the most padding: they must not come last.
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
    """The samples of one epoch after another."""

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
        """The samples of the next epoch, not in order, and the random numbers for their order."""
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
    """The samples of one epoch, by round and within a round by document."""
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
        # The rest of the document must make a sample too, or belong to this one.
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
        # A single sentence after a random next one makes no pair and is left to the next epoch.
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
        """Sentences (first, stop) of another document for each of `documents`: from a random one
        on, at least one, until there are `missing` tokens."""
        # Skip the own document: numbers from its own on are moved up by one.
        other = rng.integers(0, len(self._first) - 1, len(documents))
        other += other >= self._rank_D[documents]
        first = rng.integers(self._first[other], self._stop[other])
        stop = np.searchsorted(self._tokens, self._tokens[first] + np.maximum(missing, 1))
        return first, np.minimum(stop, self._stop[other])


# Of both errors about documents that make no pairs.
_WITHOUT_PAIRS = (
    "preprocess the text with --split-sentences, or train without pairs (--bert-no-binary-head)"
)


def check_sentences(documents: Documents, rules: SegmentRules) -> None:
    """Raises ValueError for pairs from a file without sentences: long documents would be cut
    anywhere, and all others left out."""
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
