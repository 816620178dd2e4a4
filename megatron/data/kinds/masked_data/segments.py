"""Which sentences make each sample: the index of BERT's and T5's datasets.

In an epoch every document is read from its first sentence on. A sample is made for a length, most
often the longest: it takes sentences until it has that many tokens, and at the end of a document
what is left. What goes beyond the longest length is cut off when the sample is made. In a pair the
sentences are shared out between segments A and B at random; with next-sentence prediction, B is in
half of the pairs taken from another document instead, and the document is read on behind A, so that
no sentence is lost to that (Devlin et al. 2018, arXiv:1810.04805, appendix A.2 and their
create_pretraining_data.py).

All documents are read side by side, in rounds: each round makes the next sample of every document
that has one left. So a round is a few array operations however many documents there are.

Shape suffixes: N sentences, D documents, R documents that a round makes a sample of.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from megatron.data.kinds.masked_data.random_state import epoch_rng
from megatron.data.kinds.masked_data.sentences import Sentences

logger = logging.getLogger(__name__)

Pairs = Literal["none", "sentence-order", "next-sentence"]
SHORTEST = 2
"""Tokens of the shortest length that a sample is made for."""


@dataclass(frozen=True)
class SegmentRules:
    """How sentences are put together."""

    max_tokens: int
    """Tokens of the longest length, special tokens not counted."""
    short_seq_prob: float
    """Share of samples that are made for a length drawn evenly from SHORTEST to `max_tokens`."""
    pairs: Pairs
    """Whether a sample is a pair of segments, and which pairs there are."""

    @property
    def min_sentences(self) -> int:
        """Sentences that a sample needs."""
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
) -> npt.NDArray[np.integer]:
    """The sentences of every sample, in the order in which samples are seen.

    As many epochs as the samples need are read, each shuffled by itself; sample i does not depend
    on how many are wanted.

    Args:
        part: "train", "valid" or "test": has random numbers of its own.
        source: names the documents in messages.

    Returns:
        int32[num_samples, columns] (int64 from 2**31 sentences): first sentence of segment A and
        the one behind its last, then those of B.

    Raises:
        ValueError: no sample can be made of the documents.
    """
    counts = np.diff(sentences.document_starts_D)
    usable = np.flatnonzero(counts >= rules.min_sentences)
    _check(sentences, rules, counts, len(usable), part, source)
    total = len(sentences.starts_N) - 1
    dtype = np.int32 if total <= np.iinfo(np.int32).max else np.int64
    index = np.empty((num_samples, rules.columns), dtype)
    filled, epoch = 0, 0
    while filled < num_samples:
        rng = epoch_rng(seed, part, epoch)
        rows = _epoch(sentences, rules, usable, rng, dtype)
        order = rng.permutation(len(rows))[: num_samples - filled]
        index[filled : filled + len(order)] = rows[order]
        filled += len(order)
        epoch += 1
    logger.info(
        "%s: %d samples for %s of %d documents in %d epochs%s",
        source,
        num_samples,
        part,
        len(usable),
        epoch,
        _left_out(rules, counts, len(usable)),
    )
    return index


def _epoch(
    sentences: Sentences,
    rules: SegmentRules,
    usable: np.ndarray,
    rng: np.random.Generator,
    dtype: type,
) -> np.ndarray:
    """The samples of one epoch, round after round and in each in the order of the documents."""
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
        # What is left of the document must make a sample too, or belong to this one.
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
        # A single sentence behind a random next one makes no pair: it waits for the next epoch.
        more = end - following >= rules.min_sentences
        first, end, documents = following[more], end[more], documents[more]
    return np.concatenate(rounds)


class _OtherDocuments:
    """Draws the sentences that are no continuation."""

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
        """Sentences (first, stop) of another document for each of `documents`: from one drawn
        evenly on, until there are `missing` tokens, at least one sentence."""
        # One of the others: those from the own one on are moved up by one.
        other = rng.integers(0, len(self._first) - 1, len(documents))
        other += other >= self._rank_D[documents]
        first = rng.integers(self._first[other], self._stop[other])
        stop = np.searchsorted(self._tokens, self._tokens[first] + np.maximum(missing, 1))
        return first, np.minimum(stop, self._stop[other])


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
        raise ValueError(f"{where} hold no tokens")
    if not usable:
        raise ValueError(
            f"{where} have one sentence each, and a pair needs {rules.min_sentences}: preprocess "
            "the text with --split-sentences, or train without pairs (--bert-no-binary-head)"
        )
    if rules.pairs == "next-sentence" and np.count_nonzero(counts) < 2:
        raise ValueError(
            f"{where} are a single one, and --bert-pair-task next-sentence takes half of its "
            "second segments from another document: give it more documents, or use sentence-order"
        )


def _left_out(rules: SegmentRules, counts: np.ndarray, usable: int) -> str:
    skipped = len(counts) - usable
    if not skipped:
        return ""
    return f"; {skipped} documents of fewer than {rules.min_sentences} sentences are left out"
