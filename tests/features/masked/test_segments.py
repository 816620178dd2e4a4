"""Which sentences make a sample: against the rules, followed document by document."""

import logging
import zlib

import numpy as np
import pytest

from megatron.features.masked.segments import SegmentRules, build_segments
from megatron.features.masked.sentence_numbers import Sentences

LIMIT = 10**6


def by_the_rules(documents, rules, wanted, seed, part):
    """Samples as (first, stop) of A and B in sentence numbers; plain loops.

    Args:
        documents: the lengths of each document's sentences; none is 0.

    The random numbers of an epoch are drawn for all documents that have a sample left at once,
    in this order: is it short, its length, where B begins, is B random; then for those that are:
    the other document, the sentence there.
    """
    numbered, lengths = [], []
    for document in documents:
        numbered.append(list(range(len(lengths), len(lengths) + len(document))))
        lengths += document
    samples, epoch = [], 0
    while len(samples) < wanted:
        rng = np.random.default_rng([seed, zlib.crc32(part.encode()), 0, epoch])
        waiting = {
            d: list(sentences)
            for d, sentences in enumerate(numbered)
            if len(sentences) >= rules.min_sentences
        }
        seen = []
        while waiting:
            short = rng.random(len(waiting))
            drawn = rng.integers(2, rules.max_tokens + 1, len(waiting))
            taken = {}
            for i, (d, left) in enumerate(waiting.items()):
                target = drawn[i] if short[i] < rules.short_seq_prob else rules.max_tokens
                sample = []
                while left[len(sample) :] and (
                    sum(lengths[s] for s in sample) < target or len(sample) < rules.min_sentences
                ):
                    sample.append(left[len(sample)])
                if len(left) - len(sample) < rules.min_sentences:
                    sample = list(left)
                taken[d] = (int(target), sample)
            if rules.pairs == "none":
                for d, (_, sample) in taken.items():
                    seen.append((sample[0], sample[-1] + 1))
                    del waiting[d][: len(sample)]
            else:
                splits = rng.integers(1, [len(sample) for _, sample in taken.values()])
                a_segments = {
                    d: sample[:split]
                    for (d, (_, sample)), split in zip(taken.items(), splits, strict=True)
                }
                b_segments = {d: sample[len(a_segments[d]) :] for d, (_, sample) in taken.items()}
                if rules.pairs == "next-sentence":
                    filled = [d for d, sentences in enumerate(numbered) if sentences]
                    coins = rng.random(len(taken))
                    random = [d for d, coin in zip(taken, coins, strict=True) if coin < 0.5]
                    draws = rng.integers(0, len(filled) - 1, len(random))
                    others = [
                        [f for f in filled if f != d][draw]
                        for d, draw in zip(random, draws, strict=True)
                    ]
                    firsts = rng.integers(
                        [numbered[o][0] for o in others], [numbered[o][-1] + 1 for o in others]
                    )
                    for d, other, start in zip(random, others, firsts, strict=True):
                        missing = taken[d][0] - sum(lengths[s] for s in a_segments[d])
                        b = [int(start)]
                        while sum(lengths[s] for s in b) < missing and b[-1] + 1 in numbered[other]:
                            b.append(b[-1] + 1)
                        b_segments[d] = b
                for d, (_, sample) in taken.items():
                    a, b = a_segments[d], b_segments[d]
                    seen.append((a[0], a[-1] + 1, b[0], b[-1] + 1))
                    is_next = b[0] == a[-1] + 1
                    del waiting[d][: len(sample) if is_next else len(a)]
            waiting = {d: left for d, left in waiting.items() if len(left) >= rules.min_sentences}
        samples += [seen[i] for i in rng.permutation(len(seen))]
        epoch += 1
    return samples[:wanted]


@pytest.mark.parametrize("pairs", ["none", "sentence-order", "next-sentence"])
@pytest.mark.parametrize("case", range(50))
def test_against_the_rules(case, pairs, counting):
    rng = np.random.default_rng([case, 7])
    documents = [
        rng.integers(1, rng.choice([4, 30]), rng.integers(0, 9)).tolist()
        for _ in range(rng.integers(3, 12))
    ]
    documents += [[3, 4], [5, 2, 2]]  # two that make pairs, whatever was drawn
    rules = SegmentRules(int(rng.integers(2, 40)), float(rng.choice([0, 0.1, 0.7])), pairs)
    wanted, seed = int(rng.integers(1, 80)), int(rng.integers(0, 2**32))
    sentences = Sentences.of(counting(documents), range(len(documents)), LIMIT)
    index = build_segments(sentences, rules, wanted, seed, "valid", "corpus")
    assert index.dtype == np.int32
    expected = by_the_rules(documents, rules, wanted, seed, "valid")
    assert [tuple(row) for row in index.tolist()] == expected


def test_more_samples_and_other_parts(counting):
    sentences = Sentences.of(counting([[5] * 9] * 20), range(20), LIMIT)
    rules = SegmentRules(20, 0.1, "sentence-order")
    few, many, valid = (
        build_segments(sentences, rules, n, 1, part, "corpus").tolist()
        for n, part in ((30, "train"), (500, "train"), (30, "valid"))
    )
    assert many[:30] == few
    assert valid != few


@pytest.mark.parametrize("pairs", ["none", "sentence-order"])
def test_an_epoch_reads_every_sentence_once(pairs, counting):
    documents = [[7, 3, 9, 2], [1, 1], [4] * 30]
    sentences = Sentences.of(counting(documents), range(3), LIMIT)
    rules = SegmentRules(12, 0.3, pairs)
    index = build_segments(sentences, rules, 200, 3, "train", "corpus")
    seen, rows = [], iter(index.tolist())
    while len(seen) < 36:
        row = next(rows)
        seen += range(row[0], row[-1])
    assert sorted(seen) == list(range(36))


def test_lengths_and_halves(counting):
    """One-token sentences: a sample has exactly its length. Bounds are 5 standard deviations."""
    documents = [[1] * 5000] * 40
    sentences = Sentences.of(counting(documents), range(40), LIMIT)
    rules = SegmentRules(61, 0.1, "next-sentence")
    n = 3000
    index = build_segments(sentences, rules, n, 11, "train", "corpus").astype(np.int64)
    sizes = index[:, 1] - index[:, 0] + index[:, 3] - index[:, 2]
    ends = index[:, 1] % 5000
    sizes = sizes[(ends != 0) & (index[:, 3] % 5000 != 0)]  # not at the end of a document
    short = sizes[sizes < 61]
    share = 0.1 * 59 / 60  # of the 60 lengths from 2 to 61, the last is the usual one
    assert abs(len(short) - share * len(sizes)) < 5 * np.sqrt(share * (1 - share) * len(sizes))
    expected = len(short) / 59
    counts = np.bincount(short, minlength=61)[2:61]
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 58 + 5 * np.sqrt(2 * 58)
    random = index[:, 2] != index[:, 1]
    assert abs(random.sum() - n / 2) < 5 * np.sqrt(n / 4)
    other = index[random, 2] // 5000
    own = index[random, 0] // 5000
    assert (other != own).all()
    expected = len(other) / 40
    assert ((np.bincount(other, minlength=40) - expected) ** 2 / expected).sum() < 39 + 5 * 8.9


def test_documents_of_one_sentence_are_left_out_and_counted(counting, caplog):
    sentences = Sentences.of(counting([[5], [5, 5], [], [4]]), range(4), LIMIT)
    with caplog.at_level(logging.INFO):
        index = build_segments(
            sentences, SegmentRules(20, 0.1, "sentence-order"), 4, 1, "train", "corpus"
        )
    assert index.tolist() == [[1, 2, 2, 3]] * 4
    assert "3 documents of fewer than 2 sentences are left out" in caplog.text


@pytest.mark.parametrize(
    "documents, pairs, message",
    [
        ([[0], []], "none", "the 2 documents for train have no tokens"),
        ([[3], [4]], "sentence-order", "--split-sentences.*--bert-no-binary-head"),
        (
            [[3, 4]],
            "next-sentence",
            "only one document with text, and --bert-pair-task next-sentence",
        ),
    ],
)
def test_refused(documents, pairs, message, counting):
    sentences = Sentences.of(counting(documents), range(len(documents)), LIMIT)
    with pytest.raises(ValueError, match=f"corpus: .*{message}"):
        build_segments(sentences, SegmentRules(20, 0.1, pairs), 4, 1, "train", "corpus")


@pytest.mark.parametrize("pairs", ["none", "sentence-order"])
def test_exact_epochs_are_the_first_of_a_longer_run(pairs, counting):
    """All samples of so many epochs, however many are wanted."""
    documents = [[7, 3, 9, 2], [1, 1], [4] * 30]
    sentences = Sentences.of(counting(documents), range(3), LIMIT)
    rules = SegmentRules(12, 0.3, pairs)
    longer = build_segments(sentences, rules, 200, 3, "train", "corpus")
    for epochs in (1, 3):
        index = build_segments(sentences, rules, 5, 3, "train", "corpus", epochs)
        assert np.array_equal(index, longer[: len(index)])
        read = np.concatenate([np.arange(row[0], row[-1]) for row in index])
        assert np.bincount(read).tolist() == [epochs] * 36
