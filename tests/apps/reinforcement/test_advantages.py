"""Advantages by the formulas of their papers, one text and one token after another."""

import math

import numpy as np
import pytest
from reinforcement_flags import options_of

from megatron.apps.reinforcement.advantages import (
    Texts,
    advantages,
    all_equal,
    estimate,
    generalized_advantages,
    overlong,
)

NAN = math.nan


def texts_of(rewards, groups, lengths=None, ended=None, **more):
    count = len(rewards)
    return Texts(
        np.array(rewards, float),
        np.array(groups),
        np.array([3] * count if lengths is None else lengths),
        np.array([True] * count if ended is None else ended),
        **more,
    )


def test_groups_of_any_order():
    """Shao et al. 2024: (r - mean of the group) / deviation of the group; texts of a group need
    not follow each other."""
    rewards, groups = np.array([1.0, 5.0, 3.0, 9.0, 2.0, 1.0]), np.array([0, 1, 0, 1, 0, 1])
    found = advantages(rewards, groups, options_of(rl="grpo"))
    for group in (0, 1):
        own = rewards[groups == group]
        expected = (own - own.mean()) / (own.std(ddof=1) + 1e-4)
        np.testing.assert_allclose(found[groups == group], expected, rtol=1e-12)
    plain = advantages(rewards, groups, options_of(rl="dr_grpo"))
    np.testing.assert_allclose(plain[:3], [-1.0, 0.0, 1.0], atol=1e-12)


def test_leave_one_out():
    """Ahmadian et al. 2024, equation 8, for k = 4."""
    rewards = np.array([1.0, 2.0, 4.0, 0.5])
    found = advantages(rewards, np.zeros(4, int), options_of(rl="rloo"))
    expected = [r - np.delete(rewards, place).mean() for place, r in enumerate(rewards)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_failed_rewards_change_no_other():
    """A text without a reward has advantage 0, and the others are as if it were not there."""
    for rl in ("grpo", "dr_grpo", "rloo"):
        options = options_of(rl=rl)
        groups = np.array([0, 0, 0, 0, 1, 1, 1, 1])
        with_failed = np.array([1.0, NAN, 2.0, 4.0, NAN, NAN, NAN, 7.0])
        found = advantages(with_failed, groups, options)
        alone = advantages(np.array([1.0, 2.0, 4.0]), np.zeros(3, int), options)
        np.testing.assert_allclose(found[[0, 2, 3]], alone, rtol=1e-12)
        assert not found[[1, 4, 5, 6, 7]].any()


def test_infinite_rewards_are_no_advantages():
    found = advantages(np.array([math.inf, 1.0]), np.zeros(2, int), options_of(rl="grpo"))
    assert np.isfinite(found).all()


def test_long_texts():
    """Yu et al. 2025, equation 13: 0 up to L_max - L_cache, then ((L_max - L_cache) - |y|) /
    L_cache, then -1."""
    longest, cache = 20, 5
    lengths = np.array([1, 15, 16, 18, 20])
    expected = [0, 0, 1 / 5, 3 / 5, 1]
    np.testing.assert_allclose(overlong(lengths, longest, cache), expected, rtol=1e-12)
    options = options_of(
        rl="dapo", max_completion_length=20, overlong_buffer_len=5, overlong_penalty_factor=0.5
    )
    assert options_of(rl="dapo", max_completion_length=20).overlong_buffer_len == 4
    found = estimate(texts_of([1.0] * 5, [0, 0, 0, 1, 1], lengths), options)
    np.testing.assert_allclose(found.rewards_E, 1 - 0.5 * np.array(expected), rtol=1e-12)
    # Whether a group teaches anything is a matter of the rewards, not of penalties.
    assert not found.kept_E.any()


def test_penalties_and_limits():
    options = options_of(
        rl="grpo", reward_clip_range=(-1.0, 1.0), missing_eos_penalty=0.25,
        mask_truncated_completions=True,
    )  # fmt: skip
    texts = texts_of([5.0, -3.0, 0.5, NAN], [0, 0, 0, 0], ended=[True, True, False, False])
    found = estimate(texts, options)
    np.testing.assert_allclose(found.rewards_E, [1.0, -1.0, 0.25, NAN])
    assert found.kept_E.tolist() == [True, True, False, False]


def test_equal_groups():
    rewards = np.array([1.0, 1.0, 0.0, 1.0, NAN, 2.0, NAN, NAN])
    groups = np.array([0, 0, 1, 1, 2, 2, 3, 3])
    equal = [True, True, False, False, True, True, True, True]
    assert all_equal(rewards, groups).tolist() == equal


def test_generalized_advantage_estimate():
    """Schulman et al. 2016, equations 11 and 16: the sum of (gamma lambda)^l times the residuals
    of the values."""
    random = np.random.default_rng(3)
    gamma, lam, lengths = 0.9, 0.8, [6, 3]
    rewards, values = random.normal(size=(2, 6)), random.normal(size=(2, 6))
    for row, length in enumerate(lengths):
        rewards[row, length:] = values[row, length:] = 0.0
    found = generalized_advantages(rewards, values, gamma, lam)
    for row, length in enumerate(lengths):
        for place in range(length):
            expected = 0.0
            for later in range(place, length):
                after = values[row, later + 1] if later + 1 < length else 0.0
                residual = rewards[row, later] + gamma * after - values[row, later]
                expected += (gamma * lam) ** (later - place) * residual
            assert found[row, place] == pytest.approx(expected, rel=1e-12)


def by_hand(texts, beta, gamma, values=None, lam=1.0):
    """Rewards of tokens, and of these the sums, token by token."""
    rows = []
    for number, length in enumerate(texts.lengths_E):
        rewards = [-beta * texts.divergences[number][place] for place in range(length)]
        rewards[-1] += texts.rewards_E[number]
        row = []
        for place in range(length):
            total = 0.0
            for later in range(place, length):
                now = after = 0.0
                if values is not None:
                    now = values[number][later]
                    after = values[number][later + 1] if later + 1 < length else 0.0
                total += (gamma * lam) ** (later - place) * (rewards[later] + gamma * after - now)
            row.append(total)
        rows.append(row)
    return rows


def normalised(rows):
    numbers = np.concatenate(rows)
    deviation = math.sqrt(numbers.var(ddof=1) + 1e-8)
    return [(np.array(row) - numbers.mean()) / deviation for row in rows]


def drawn(lengths, seed=5):
    random = np.random.default_rng(seed)
    return [random.normal(size=length) for length in lengths]


def test_ppo():
    """Advantages of tokens with the divergence as their reward (Ziegler et al. 2019, equation 2),
    and returns."""
    lengths = [4, 2, 5]
    options = options_of(rl="ppo", gamma=0.95, lam=0.9, beta=0.1)
    values = drawn(lengths, 6)
    texts = texts_of([1.0, 0.0, 2.0], [0, 1, 2], lengths,
                     divergences=drawn(lengths), values=values)  # fmt: skip
    found = estimate(texts, options)
    rows = by_hand(texts, 0.1, 0.95, values, 0.9)
    for own, row, value in zip(found.returns, rows, values, strict=True):
        np.testing.assert_allclose(own, np.array(row) + value, rtol=1e-12)
    for own, expected in zip(found.advantages, normalised(rows), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-12)


@pytest.mark.parametrize("size", [1, 2])
def test_reinforce_plus_plus(size):
    """Hu 2025, equations 7 and 8: the reward less the divergence of this and later tokens,
    normalised over the batch; in groups the reward is less their mean (its "-baseline")."""
    lengths = [4, 2, 5, 1]
    options = options_of(rl="reinforce++", beta=0.1, num_generations=size)
    rewards, groups = np.array([1.0, 0.0, 2.0, 5.0]), np.arange(4) // size
    texts = texts_of(rewards, groups, lengths, divergences=drawn(lengths))
    found = estimate(texts, options)
    assert found.returns is None
    if size == 2:
        rewards = rewards - np.array([0.5, 0.5, 3.5, 3.5])
    rows = by_hand(texts._replace(rewards_E=rewards), 0.1, 1.0)
    for own, expected in zip(found.advantages, normalised(rows), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-12)


def test_failed_rewards_of_tokens():
    """A text without a reward moves neither the others' mean nor their deviation."""
    lengths = [4, 2, 5]
    divergences, values = drawn(lengths), drawn(lengths, 6)
    options = options_of(rl="ppo")
    whole = texts_of([1.0, NAN, 2.0], [0, 1, 2], lengths, divergences=divergences, values=values)
    less = texts_of(
        [1.0, 2.0], [0, 2], lengths[::2], divergences=divergences[::2], values=values[::2]
    )
    found, expected = estimate(whole, options), estimate(less, options)
    assert not found.advantages[1].any() and np.isfinite(found.returns[1]).all()
    for own, other in zip(found.advantages[::2], expected.advantages, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-12)


def test_texts_without_tokens():
    for rl in ("grpo", "reinforce++"):
        found = estimate(texts_of([1.0, 2.0], [0, 0], [0, 2]), options_of(rl=rl, beta=0.0))
        assert [len(row) for row in found.advantages] == [0, 2]
