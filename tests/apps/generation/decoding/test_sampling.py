"""Choosing tokens, against transformers and against the definition."""

import math
import time

import numpy as np
import pytest
import torch
from small_tokenizers import small_tokenizers
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import TemperatureLogitsWarper

from megatron.apps.generation.decoding.sampling import (
    TokenSampler,
    most_probable,
    nucleus,
    place_of,
    token_score,
)
from megatron.apps.generation.request import Beams, Sampling
from megatron.tokenizer.plain import NullTokenizer


def logits(rows=16, vocab=97, seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * scale


def probabilities(values, sampling, prompt=(0,)):
    """Of all tokens, as they are drawn."""
    ids, kept = TokenSampler(sampling, prompt).kept(values)
    found = torch.zeros_like(values)
    found[torch.as_tensor(ids)] = torch.as_tensor(kept)
    return found


def same_as(values, sampling, *warpers, prompt=(0,)):
    for row in values:
        expected = row[None]
        for warper in warpers:
            expected = warper(torch.tensor([list(prompt)]), expected)
        expected, found = expected[0].softmax(-1), probabilities(row, sampling, prompt)
        assert torch.equal(found > 0, expected > 0)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("vocab", [97, 20_000])
@pytest.mark.parametrize("count", [1, 2, 10, 96, 97, 500])
def test_top_k_against_transformers(count, vocab):
    same_as(logits(4, vocab), Sampling(top_k=count), TopKLogitsWarper(count))


def test_top_k_keeps_ties_as_transformers_does():
    tied = torch.tensor([[3.0, 1.0, 1.0, 0.0]])
    same_as(tied, Sampling(top_k=2), TopKLogitsWarper(2))
    assert (probabilities(tied[0], Sampling(top_k=2)) > 0).sum() == 3


@pytest.mark.parametrize("vocab", [97, 20_000])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_top_p_against_transformers(share, scale, vocab):
    """With 20,000 tokens there is a difference in the rounding of their sum: one token at the
    edge."""
    values = logits(4, vocab, scale=scale).double()
    for row in values:
        kept = TopPLogitsWarper(share)(None, row[None])[0].isfinite()
        found = probabilities(row.float(), Sampling(top_p=share)) > 0
        assert abs(int(kept.sum()) - int(found.sum())) <= (vocab > 97)
        assert (kept ^ found).sum() <= (vocab > 97)


def test_top_p_is_the_smallest_set():
    values = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    for share, kept in ((0.4, [1]), (0.6, [1, 3]), (0.76, [1, 2, 3]), (0.95, [0, 1, 2, 3])):
        assert TokenSampler(Sampling(top_p=share), []).kept(values)[0].tolist() == kept


@pytest.mark.parametrize("shape", ["equal", "near", "wide", "some equal"])
@pytest.mark.parametrize("share", [1e-6, 0.3, 0.9, 0.999])
def test_a_nucleus_without_a_full_sort(shape, share):
    """Where many weights are candidates, against a sort of all."""
    rng = np.random.default_rng(0)
    weights = {
        "equal": np.ones(20_000),
        "near": np.exp(rng.normal(size=20_000) * 1e-3),
        "wide": np.exp(rng.normal(size=20_000) * 8),
        "some equal": rng.integers(1, 5, 20_000).astype(float),
    }[shape].astype(np.float32)
    order = np.argsort(-weights, kind="stable")
    sums = np.cumsum(weights[order], dtype=np.float64)
    expected = np.sort(order[: np.searchsorted(sums, share * sums[-1]) + 1])
    found = nucleus(weights, share)
    assert abs(len(found) - len(expected)) <= 1  # the sum is rounded
    assert len(np.setxor1d(found, expected)) <= 1


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 1.0])
def test_min_p_against_transformers(share):
    same_as(logits(), Sampling(min_p=share), MinPLogitsWarper(share))


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_repetition_penalty_against_transformers(penalty):
    same_as(
        logits(),
        Sampling(repetition_penalty=penalty),
        RepetitionPenaltyLogitsProcessor(penalty),
        prompt=(3, 9, 9, 50),
    )


def test_order_against_transformers():
    """Penalty, temperature, then top-k, top-p and min-p, as transformers.generate applies them."""
    same_as(
        logits(),
        Sampling(temperature=0.7, top_k=12, top_p=0.8, min_p=0.05, repetition_penalty=1.2),
        RepetitionPenaltyLogitsProcessor(1.2),
        TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(12),
        TopPLogitsWarper(0.8),
        MinPLogitsWarper(0.05),
        prompt=(1, 2, 3),
    )


def test_presence_and_frequency_are_of_new_tokens_only():
    """OpenAI's and vLLM's definition."""
    values = torch.zeros(9)
    wanted = Sampling(presence_penalty=0.5, frequency_penalty=0.25, bias={4: 1.0, 7: -2.0})
    sampler = TokenSampler(wanted, [0, 0, 1])
    chosen = []
    for forced in (2, 2, 3):
        allowed = np.zeros(9, bool)
        allowed[forced] = True
        chosen.append(sampler.choose(values, allowed))
    assert chosen == [2, 2, 3]
    expected = torch.tensor([0, 0, -1.0, -0.75, 1.0, 0, 0, -2.0, 0]).softmax(-1)
    torch.testing.assert_close(torch.tensor(sampler.kept(values)[1]), expected)
    assert torch.equal(values, torch.zeros(9))


def test_top_p_decays_to_its_bound():
    sampler = TokenSampler(Sampling(top_p=0.9, top_p_decay=0.5, top_p_bound=0.3, seed=0), [1])
    values, counts = torch.zeros(100), []
    for _ in range(4):
        counts.append(len(sampler.kept(values)[0]))
        sampler.choose(values)
    assert counts == [90, 45, 30, 30]
    unbounded = TokenSampler(Sampling(top_p=0.9, top_p_decay=1e-30, seed=0), [1])
    for _ in range(20):
        unbounded.choose(values)
    assert len(unbounded.kept(values)[0]) == 1


SETTINGS = [
    Sampling(), Sampling(temperature=0.5), Sampling(temperature=2.0), Sampling(top_k=3),
    Sampling(top_p=0.6), Sampling(min_p=0.3), Sampling(repetition_penalty=1.5, top_k=5),
]  # fmt: skip


def frequencies(sampling, draws):
    """How often each token is drawn at a position, less the expectation, in standard errors."""
    row, prompt = logits(1, 8, seed=4, scale=1.0)[0], (2, 5)
    expected = probabilities(row, sampling, prompt).double()
    counts = torch.zeros(8, dtype=torch.float64)
    for seed in range(draws):
        wanted = Sampling(**{**vars(sampling), "seed": seed})
        counts[TokenSampler(wanted, prompt).choose(row)] += 1
    assert not counts[expected == 0].any()
    kept = (expected > 0) & (expected < 1)
    error = (expected * (1 - expected) * draws).sqrt()
    return ((counts - expected * draws) / error)[kept]


@pytest.mark.proof
@pytest.mark.parametrize("sampling", SETTINGS)
def test_frequencies(sampling):
    """20,000 draws, each with another seed, against the probabilities."""
    assert frequencies(sampling, 20_000).abs().max() < 4


def test_frequencies_of_few_draws():
    assert frequencies(SETTINGS[3], 1000).abs().max() < 4


@pytest.mark.parametrize("top_k", [0, 40])
def test_frequencies_over_the_positions_of_a_text(top_k):
    """One seed; a vocabulary that is summed in blocks."""
    row = logits(1, 20_000, seed=5, scale=4.0)[0]
    sampler = TokenSampler(Sampling(seed=3, top_k=top_k), [1])
    ids, kept = sampler.kept(row)
    groups = torch.tensor(np.arange(len(ids)) * 8 // len(ids))
    group_of = dict(zip(ids.tolist(), groups.tolist(), strict=True))
    expected = torch.zeros(8).index_add(0, groups, torch.tensor(kept)).double()
    counts, draws = torch.zeros(8, dtype=torch.float64), 1000
    for _ in range(draws):
        counts[group_of[sampler.choose(row)]] += 1
    error = (expected * (1 - expected) * draws).sqrt()
    assert ((counts - expected * draws) / error).abs().max() < 4


@pytest.mark.parametrize("count", [1, 5, 4096, 5000, 20_011])
def test_the_place_of_a_share(count):
    """Against running sums in float64, and never a weight of 0."""
    rng = np.random.default_rng(count)
    weights = rng.random(count).astype(np.float32)
    weights[rng.random(count) < 0.3] = 0
    weights[[0, -1]] = 0
    weights[count // 2] = 0.5
    sums = np.cumsum(weights.astype(np.float64))
    for uniform in (0.0, 1 - 2**-53, *rng.random(200)):
        place = place_of(weights, uniform)
        assert weights[place] > 0
        low, high = (sums[place] - weights[place]) / sums[-1], sums[place] / sums[-1]
        assert low - 1e-7 <= uniform <= high + 1e-7


def test_a_row_draws_by_itself():
    """Draws depend on seed, position and logits, not on other rows or what came before."""
    values = logits(3, 300)

    def samplers():
        return [TokenSampler(Sampling(seed=row), [5] * (row + 1)) for row in range(3)]

    # In either order of the rows.
    together = [sampler.choose(row) for sampler, row in zip(samplers(), values, strict=True)]
    assert together[::-1] == [samplers()[row].choose(values[row]) for row in (2, 1, 0)]
    sampler = TokenSampler(Sampling(seed=0), [5])
    first = [sampler.choose(row) for row in values]
    assert len(set(first)) > 1 and first[0] == together[0]
    later = TokenSampler(Sampling(seed=0), [5, *first[:2]])
    assert later.choose(values[2]) == first[2]


def test_draws_differ_between_seeds_and_without_one():
    flat = torch.zeros(50_000)
    chosen = {TokenSampler(Sampling(seed=seed), [1]).choose(flat) for seed in (0, 1, 2**70, -1)}
    chosen |= {TokenSampler(Sampling(), [1]).choose(flat) for _ in range(2)}
    assert len(chosen) == 6


def test_greedy_is_argmax():
    chosen = [TokenSampler(Sampling(greedy=True), [1]).choose(row) for row in logits()]
    assert chosen == logits().argmax(-1).tolist()
    tied = torch.tensor([0.0, 2.0, 2.0])
    assert TokenSampler(Sampling(greedy=True), []).choose(tied) == 1


@pytest.mark.parametrize("greedy", [True, False])
def test_only_what_is_allowed(greedy):
    allowed = np.zeros(97, bool)
    allowed[[5, 80]] = True
    sampler = TokenSampler(Sampling(greedy=greedy, seed=1), [1])
    assert {sampler.choose(row, allowed) for row in logits()} <= {5, 80}
    with pytest.raises(ValueError, match="every one is excluded"):
        sampler.choose(logits()[0], np.zeros(97, bool))


def test_logits_that_are_no_numbers():
    for wrong in (torch.nan, torch.inf):
        values = logits()[0]
        values[3] = wrong
        for greedy in (True, False):
            with pytest.raises(ValueError, match="NaN or infinity"):
                TokenSampler(Sampling(greedy=greedy), [1]).choose(values)


def test_no_newline_after_a_colon(tmp_path):
    tokenizer = small_tokenizers(tmp_path)["gpt2"]()
    colon, newline = (tokenizer.token_bytes.index(token) for token in (b":", b"\n"))
    best = torch.zeros(tokenizer.vocab_size)
    best[tokenizer.newline_tokens] = 8
    best[newline], best[colon] = 9, 7
    wanted = Sampling(greedy=True, prevent_newline_after_colon=True)
    sampler = TokenSampler(wanted, [colon], tokenizer)
    assert [sampler.choose(best) for _ in range(3)] == [colon, colon, colon]
    sampler = TokenSampler(wanted, [newline], tokenizer)
    assert sampler.choose(best) == newline
    with pytest.raises(ValueError, match="needs a tokenizer"):
        TokenSampler(wanted, [1])
    assert NullTokenizer(9).newline_tokens == []


@pytest.mark.parametrize("vocab", [97, 20_000])
def test_scores(vocab):
    values = logits(4, vocab) + 20  # where float32 has a spacing of 2e-6
    expected = values.double().log_softmax(-1)
    for row, wanted in zip(values, expected, strict=True):
        score = token_score(row, 13, top=7)
        assert score.token == 13 and abs(score.logprob - float(wanted[13])) < 1e-6
        top = wanted.topk(7)
        assert [token for token, _ in score.top] == top.indices.tolist()
        assert [p for _, p in score.top] == pytest.approx(top.values.tolist(), abs=1e-6)
    assert token_score(values[0], 13).top == ()
    assert most_probable(np.array([0, 2, 1, 2, 2], np.float32), 2) == [1, 3]
    assert most_probable(np.array([0, 2], np.float32), 5) == [1, 0]


def test_greedy_of_many_rows_takes_no_time():
    values = logits(64, 50_257)
    samplers = [TokenSampler(Sampling(greedy=True), [1]) for _ in range(64)]
    seconds = []
    for _ in range(5):
        start = time.process_time()
        for sampler, row in zip(samplers, values, strict=True):
            sampler.choose(row)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.01


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": 0.0}, "temperature 0.0 must be positive; greedy"),
        ({"temperature": math.nan}, "temperature nan must be a finite number"),
        ({"top_k": -1}, "top_k -1 must be 0 or more"),
        ({"top_p": 0.0}, "top_p 0.0 must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p 1.5"),
        ({"top_p_decay": 1.1}, "top_p_decay 1.1 must be 0 to 1"),
        ({"top_p": 0.5, "top_p_decay": 0.5, "top_p_bound": 0.6}, "0 to top_p, which is 0.5"),
        ({"top_p_bound": 0.5}, "top_p_bound 0.5 must be 0 without top_p_decay"),
        ({"min_p": -0.1}, "min_p -0.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty 0.0 must be above 0"),
        ({"presence_penalty": math.inf}, "presence_penalty inf must be a finite number"),
        ({"bias": {-1: 2.0}}, "bias 2.0 of token -1"),
        ({"bias": {1: math.nan}}, "bias nan of token 1"),
    ],
)
def test_wrong_values(wrong, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**wrong)


def test_wrong_beams():
    with pytest.raises(ValueError, match="width 0 must be 1 or more"):
        Beams(0)
    with pytest.raises(ValueError, match="length_penalty nan"):
        Beams(2, math.nan)
