"""BERT's masks: shares and chances as published. Bounds are 5 standard deviations."""

import numpy as np
import pytest

from megatron.features.masked.bert import WordMasking

VOCAB_SIZE, MASK = 50_000, 3
TOKENS = np.arange(1000, 1000 + 512)
SEGMENTS = (range(1, 300), range(301, 511))


def masking(**changes) -> WordMasking:
    values = {
        "mask_prob": 0.15,
        "max_predictions": 80,
        "max_ngrams": 3,
        "favor_longer": False,
        "mask_token": MASK,
        "vocab_size": VOCAB_SIZE,
        "word_starts_V": np.arange(VOCAB_SIZE) % 4 != 2,
    }
    return WordMasking(**(values | changes))


def near(count: int, chance: float, draws: int) -> bool:
    return abs(count - chance * draws) < 5 * np.sqrt(chance * (1 - chance) * draws)


@pytest.mark.parametrize("mask_prob, max_predictions", [(0.15, 80), (0.15, 20), (0.5, 300)])
@pytest.mark.parametrize("whole_words", [True, False])
def test_number_of_predictions(mask_prob, max_predictions, whole_words):
    rule = masking(mask_prob=mask_prob, max_predictions=max_predictions)
    if not whole_words:
        rule = masking(mask_prob=mask_prob, max_predictions=max_predictions, word_starts_V=None)
    wanted = min(round(512 * mask_prob), max_predictions)
    for seed in range(30):
        chosen = rule.choose(TOKENS, SEGMENTS, np.random.default_rng(seed))
        # The rest of a share may be too small for a whole word: words here have 1 or 2 tokens.
        assert wanted - whole_words <= len(chosen) <= wanted
        assert (np.diff(chosen) > 0).all()
        assert not {0, 300, 511} & set(chosen.tolist())


def test_words_are_chosen_whole():
    rule = masking()
    begins = rule.word_starts_V[TOKENS]
    cut = 0
    for seed in range(50):
        chosen = set(rule.choose(TOKENS, SEGMENTS, np.random.default_rng(seed)).tolist())
        for segment in SEGMENTS:
            for position in segment:
                if position > segment.start and not begins[position]:
                    assert (position in chosen) == (position - 1 in chosen)
                    cut += position in chosen
    assert cut > 100


def test_every_word_is_as_likely():
    """Not those of a document's start, and both segments."""
    rule = masking(word_starts_V=None, max_ngrams=1)
    counts = np.zeros(512)
    for seed in range(4000):
        counts[rule.choose(TOKENS, SEGMENTS, np.random.default_rng([1, seed]))] += 1
    counts = np.concatenate([counts[list(segment)] for segment in SEGMENTS])
    chance = 77 / 509
    assert counts.sum() == 4000 * 77
    assert (np.abs(counts - 4000 * chance) < 5 * np.sqrt(4000 * chance * (1 - chance))).all()


@pytest.mark.parametrize("favor_longer", [False, True])
@pytest.mark.parametrize("max_ngrams", [1, 3, 5])
def test_ngrams(max_ngrams, favor_longer):
    """Few picks of many words: a run of chosen tokens is nearly always one pick."""
    rule = masking(
        word_starts_V=None,
        max_ngrams=max_ngrams,
        favor_longer=favor_longer,
        mask_prob=0.0025,
        max_predictions=50,
    )
    tokens = np.full(20_000, 1000)
    sizes = np.zeros(3 * max_ngrams + 1)
    for seed in range(200):
        chosen = rule.choose(tokens, [range(20_000)], np.random.default_rng([2, seed]))
        runs = np.split(chosen, np.flatnonzero(np.diff(chosen) > 1) + 1)
        for run in runs:
            sizes[len(run)] += 1
    expected = 1 / np.arange(1, max_ngrams + 1)
    expected = (expected[::-1] if favor_longer else expected) / expected.sum()
    shares = sizes[1 : max_ngrams + 1] / sizes.sum()
    # 50 tokens in all: the last pick may be shortened to fit, one of some 50 / mean size.
    mean = (expected * np.arange(1, max_ngrams + 1)).sum()
    margin = mean / 50 + 5 * np.sqrt(0.25 / sizes.sum())
    assert np.abs(shares - expected).max() < margin
    if max_ngrams == 1:
        assert shares[0] > 0.99


def test_ngrams_stay_in_their_segment():
    rule = masking(word_starts_V=None, max_ngrams=10, favor_longer=True, mask_prob=0.9)
    for seed in range(50):
        chosen = rule.choose(TOKENS, SEGMENTS, np.random.default_rng(seed)).tolist()
        assert not {0, 300, 511} & set(chosen)


def test_eighty_ten_ten():
    rule, n = masking(), 200_000
    tokens = np.full(n, 1234)
    replaced = rule.replace(tokens, np.arange(n), np.random.default_rng(8))
    masked, kept = int((replaced == MASK).sum()), int((replaced == 1234).sum())
    assert near(masked, 0.8 + 0.1 / VOCAB_SIZE, n)
    assert near(kept, 0.1 + 0.1 / VOCAB_SIZE, n)
    random = replaced[(replaced != MASK) & (replaced != 1234)]
    counts, _ = np.histogram(random, bins=50, range=(0, VOCAB_SIZE))
    expected = len(random) / 50
    assert ((counts - expected) ** 2 / expected).sum() < 49 + 5 * np.sqrt(2 * 49)
    untouched = rule.replace(tokens, np.array([5, 9]), np.random.default_rng(8))
    assert set(np.flatnonzero(untouched != 1234)) <= {5, 9}


def test_short_samples_have_a_prediction():
    """The only words have 3 tokens, and 15 % of 8 is 1."""
    starts = np.arange(VOCAB_SIZE) % 3 == 0
    tokens = np.array([0, 3, 4, 5, 1, 6, 7, 8, 1])
    rule = masking(word_starts_V=starts)
    segments = (range(1, 4), range(5, 8))
    chosen = rule.choose(tokens, segments, np.random.default_rng(1)).tolist()
    assert chosen in ([1, 2, 3], [5, 6, 7])
    limited = masking(word_starts_V=starts, max_predictions=2)
    assert not len(limited.choose(tokens, segments, np.random.default_rng(1)))


def test_first_token_of_a_segment_begins_a_word():
    """A segment may start within a word, or with a word that has no mark there."""
    starts = np.zeros(VOCAB_SIZE, bool)
    rule = masking(word_starts_V=starts, mask_prob=0.5)
    chosen = rule.choose(
        np.arange(1000, 1010), (range(1, 5), range(6, 10)), np.random.default_rng(1)
    )
    assert chosen.tolist() in ([1, 2, 3, 4], [6, 7, 8, 9])
