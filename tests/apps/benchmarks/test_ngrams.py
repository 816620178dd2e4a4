"""N-grams on small vocabularies, where everything can be counted."""

from itertools import product

import ngrams
import numpy as np
import pytest
import torch

SIZE, MASK = 5, 4
KNOWN = [1, 3, 0, 2, 2]
"""Three hidden tokens and the visible ones next to them."""


@pytest.fixture
def bigram():
    generator = torch.Generator().manual_seed(1)
    chain = torch.rand(SIZE, SIZE, generator=generator)
    unigram = torch.rand(SIZE, generator=generator)
    return ngrams.Bigram(unigram / unigram.sum(), chain / chain.sum(1, keepdim=True), 0.5)


def weight(bigram, tokens, shown):
    """Probability of a chain and of what is shown in the place of its inner tokens."""
    result = 1.0
    for one, next_one in zip(tokens[:-1], tokens[1:], strict=True):
        result *= float(bigram.chain_VV[one, next_one])
    for token, seen in zip(tokens[1:-1], shown, strict=True):
        kept = (1 - ngrams.MASKED - ngrams.RANDOM) * (token == seen)
        result *= ngrams.MASKED if seen == MASK else kept + ngrams.RANDOM / SIZE
    return result


def share(bigram, shown, chosen, possible):
    return sum(weight(bigram, each, shown) for each in chosen) / sum(
        weight(bigram, each, shown) for each in possible
    )


def test_tokens_at_once_are_those_of_all_chains(bigram):
    shown = [MASK, 0, MASK]
    text = ngrams.HiddenText(np.array(KNOWN), np.array([1, 2, 3]), np.array(shown))
    found = ngrams.token_losses(bigram, [text], MASK)
    chains = [[KNOWN[0], *inner, KNOWN[-1]] for inner in product(range(SIZE), repeat=3)]
    for place in (1, 2, 3):
        chosen = [each for each in chains if each[place] == KNOWN[place]]
        expected = -np.log(share(bigram, shown, chosen, chains))
        assert found.both[place - 1] == pytest.approx(expected, rel=1e-5)
    first = bigram.chain_VV[KNOWN[0], KNOWN[1]]
    assert found.left[0] == pytest.approx(-float(first.log()), rel=1e-5)
    assert found.unigram[0] == pytest.approx(-float(bigram.unigram_V[KNOWN[1]].log()), rel=1e-5)


def test_tokens_one_by_one_multiply_to_the_chain(bigram):
    text = ngrams.HiddenText(np.array(KNOWN), np.array([1, 2, 3]))
    found = ngrams.token_losses(bigram, [text], answers_known=True)
    shown = [MASK] * 3
    chains = [[KNOWN[0], *inner, KNOWN[-1]] for inner in product(range(SIZE), repeat=3)]
    expected = -np.log(share(bigram, shown, [KNOWN], chains))
    assert found.both.sum() == pytest.approx(expected, rel=1e-5)
    steps = [-float(bigram.chain_VV[a, b].log()) for a, b in zip(KNOWN, KNOWN[1:4], strict=False)]
    assert found.left == pytest.approx(steps, rel=1e-5)


def test_fitted_chances_sum_to_one_and_follow_the_text():
    texts = [np.array([0, 1, 2, 0, 1, 2, 0, 1, 3])] * 10
    bigram = ngrams.Bigram.fit(texts, SIZE)
    assert bigram.chain_VV.sum(1) == pytest.approx(np.ones(SIZE), rel=1e-5)
    assert float(bigram.unigram_V.sum()) == pytest.approx(1, rel=1e-5)
    assert bigram.chain_VV[0].argmax() == 1 and bigram.chain_VV[0, 1] > 0.9
    assert (bigram.chain_VV > 0).all() and bigram.chain_VV[1, 2] > bigram.chain_VV[1, 3]


def test_losses_are_in_the_order_of_the_texts(bigram):
    texts = [
        ngrams.HiddenText(np.array([0, 1, 2, 3]), np.array([1])),
        ngrams.HiddenText(np.array([0, 1, 2, 3, 0]), np.array([1, 3])),
        ngrams.HiddenText(np.array([0, 1, 2, 3]), np.array([1, 2])),
    ]
    whole = ngrams.token_losses(bigram, texts, answers_known=True)
    alone = [ngrams.token_losses(bigram, [text], answers_known=True) for text in texts]
    assert whole.both == pytest.approx(np.concatenate([each.both for each in alone]))
