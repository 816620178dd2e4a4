"""Choosing tokens, against transformers and against the definition."""

import math

import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper
from transformers.generation import TemperatureLogitsWarper

from megatron.inference.sampling import Sampling, keep_top_k, keep_top_p


def logits(rows=64, vocab=97, seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * scale


@pytest.mark.parametrize("count", [1, 2, 10, 96, 97, 500])
def test_top_k_against_transformers(count):
    assert torch.equal(keep_top_k(logits(), count), TopKLogitsWarper(count)(None, logits()))


def test_top_k_keeps_ties_as_transformers_does():
    tied = torch.tensor([[3.0, 1.0, 1.0, 0.0]])
    assert torch.equal(keep_top_k(tied, 2), TopKLogitsWarper(2)(None, tied))
    assert keep_top_k(tied, 2).isfinite().sum() == 3


@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_top_p_against_transformers(share, scale):
    values = logits(scale=scale)
    assert torch.equal(keep_top_p(values, share), TopPLogitsWarper(share)(None, values))


def test_top_p_is_the_smallest_set():
    values = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).log()
    for share, kept in ((0.4, [1]), (0.6, [1, 3]), (0.76, [1, 2, 3]), (0.95, [0, 1, 2, 3])):
        assert keep_top_p(values, share)[0].isfinite().nonzero().flatten().tolist() == kept


def test_order_against_transformers():
    """Temperature, then top-k, then top-p, as transformers.generate applies them."""
    values = logits()
    expected = values
    for warper in (TemperatureLogitsWarper(0.7), TopKLogitsWarper(12), TopPLogitsWarper(0.8)):
        expected = warper(None, expected)
    assert torch.equal(Sampling(temperature=0.7, top_k=12, top_p=0.8).filtered(values), expected)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.5), Sampling(top_k=3), Sampling(top_p=0.6)]
)
def test_frequencies(sampling):
    """Chi-squared of 20,000 draws against the probabilities."""
    draws, vocab = 20_000, 8
    row = logits(1, vocab, seed=4, scale=1.0)
    expected = sampling.filtered(row).softmax(-1)[0]
    generator = torch.Generator().manual_seed(1)
    chosen = sampling.choose(row.expand(draws, vocab), [generator] * draws)
    counts = torch.bincount(torch.tensor(chosen), minlength=vocab).double()
    kept = expected > 0
    assert counts[~kept].sum() == 0
    wanted = expected[kept].double() * draws
    degrees = int(kept.sum()) - 1
    chi_squared = float(((counts[kept] - wanted) ** 2 / wanted).sum())
    assert chi_squared < degrees + 4 * math.sqrt(2 * degrees)


def test_a_row_draws_by_itself():
    values = logits(3)

    def generators():
        return [torch.Generator().manual_seed(row) for row in range(3)]

    together = Sampling().choose(values, generators())
    alone = [
        Sampling().choose(values[row : row + 1], generators()[row : row + 1])[0] for row in range(3)
    ]
    assert together == alone


def test_greedy_is_argmax():
    assert Sampling(greedy=True).choose(logits(), []) == logits().argmax(-1).tolist()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": 0.0}, "--temperature 0.0 must be positive"),
        ({"top_k": -1}, "--top-k -1"),
        ({"top_p": 0.0}, r"--top-p 0.0 must be in \(0, 1\]"),
        ({"top_p": 1.5}, "--top-p 1.5"),
    ],
)
def test_wrong_values(wrong, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**wrong)
