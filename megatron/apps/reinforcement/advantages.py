"""Advantages: how much better than average a completion, or one of its tokens, is.

Every rank has the values of all completions of a step in sample order, so the results do not depend
on the layout. A completion that could not be scored has a reward of NaN: it is excluded from all
means, and its advantage is 0.

Shapes: E completions of a step, L tokens of a completion that the policy sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.apps.reinforcement.flags import ReinforcementConfig

Floats = npt.NDArray[np.float64]

SMALLEST_DEVIATION, SMALLEST_VARIANCE = 1e-4, 1e-8
"""Constants added to the standard deviation of rewards and to the variance of token advantages
before dividing by them, as in trl."""


class Texts(NamedTuple):
    """Completions of a step, before training on them.

    Attributes:
        rewards_E: reward of each completion; NaN if it was not scored.
        groups_E: group number of each completion, int64.
        lengths_E: number of tokens that the policy sampled in each completion.
        ended_E: False for completions that were truncated.
        divergences: estimated KL divergence from the reference model at each token, a float64 [L]
            per completion. None unless the divergence is subtracted from the rewards.
        values: value head's prediction before each token, a float64 [L] per completion. None
            without a value head.
    """

    rewards_E: Floats
    groups_E: npt.NDArray[np.int64]
    lengths_E: npt.NDArray[np.int64]
    ended_E: npt.NDArray[np.bool_]
    divergences: Sequence[Floats] | None = None
    values: Sequence[Floats] | None = None


class TextAdvantages(NamedTuple):
    """Advantages of the completions of a step.

    Attributes:
        advantages: advantage of each token, a float64 [L] per completion.
        returns: the value head's targets, a float64 [L] per completion; None without a value head.
        rewards_E: rewards after clipping and penalties, and less the divergence if one is given and
            advantages are not per token.
        kept_E: False for completions whose tokens are excluded from the loss.
    """

    advantages: list[Floats]
    returns: list[Floats] | None
    rewards_E: Floats
    kept_E: npt.NDArray[np.bool_]


def estimate(texts: Texts, options: ReinforcementConfig) -> TextAdvantages:
    """Compute the advantages of all completions of a step with the run's algorithm."""
    rewards_E = penalised(texts, options)
    kept_E = np.ones(len(rewards_E), dtype=bool)
    if options.mask_truncated_completions:
        kept_E &= texts.ended_E
    if options.dynamic_sampling:
        kept_E &= ~all_equal(texts.rewards_E, texts.groups_E)
    returns = None
    if options.by_token:
        rows, returns = token_advantages(texts._replace(rewards_E=rewards_E), options)
    else:
        if texts.divergences is not None:
            assert options.beta is not None
            rewards_E = rewards_E - options.beta * np.array([d.sum() for d in texts.divergences])
        advantages_E = advantages(rewards_E, texts.groups_E, options)
        rows = [np.full(n, a) for n, a in zip(texts.lengths_E, advantages_E, strict=True)]
    return TextAdvantages(rows, returns, rewards_E, kept_E)


def penalised(texts: Texts, options: ReinforcementConfig) -> Floats:
    """Return the rewards, clipped to the configured range, less the penalties for long and
    truncated completions, [E]."""
    rewards_E = texts.rewards_E
    if options.reward_clip_range is not None:
        rewards_E = np.clip(rewards_E, *options.reward_clip_range)
    rewards_E = rewards_E - options.missing_eos_penalty * ~texts.ended_E
    buffer = options.overlong_buffer_len or 0
    if not buffer:
        return rewards_E
    longest = options.max_completion_length
    return rewards_E - options.overlong_penalty_factor * overlong(texts.lengths_E, longest, buffer)


def overlong(lengths_E: npt.NDArray[np.int64], longest: int, buffer: int) -> Floats:
    """Return the fraction of the length penalty that applies to each completion, [E]: 0 up to
    ``longest`` - ``buffer`` tokens, then rising linearly to 1 at ``longest`` (Yu et al. 2025,
    arXiv:2503.14476, equation 13)."""
    return np.clip((lengths_E - (longest - buffer)) / buffer, 0.0, 1.0)


def all_equal(rewards_E: Floats, groups_E: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return True for each completion whose group has equal rewards, [E]. NaN rewards are
    ignored."""
    groups = _Groups(groups_E)
    known_E = ~np.isnan(rewards_E)
    low_E = groups.least(np.where(known_E, rewards_E, np.inf))
    high_E = -groups.least(np.where(known_E, -rewards_E, np.inf))
    return low_E >= high_E


def advantages(
    rewards_E: Floats, groups_E: npt.NDArray[np.int64], options: ReinforcementConfig
) -> Floats:
    """Return the advantage of each completion, [E], which all of its tokens share.

    The default is the reward less the mean of its group, divided by the standard deviation of the
    group or of all rewards (Shao et al. 2024, arXiv:2402.03300, section 4.1.2; Liu et al. 2025,
    arXiv:2508.08221). ``--rl rloo`` subtracts the mean of the group's other completions instead
    (Ahmadian et al. 2024, arXiv:2402.14740, equation 8); with ``--scale-rewards batch`` the result
    is normalised over all completions.
    """
    groups = _Groups(groups_E)
    known_E = ~np.isnan(rewards_E)
    zeroed_E = np.where(known_E, rewards_E, 0.0)
    count_E, sum_E = groups.sum(known_E.astype(np.float64)), groups.sum(zeroed_E)
    with np.errstate(divide="ignore", invalid="ignore"):
        if options.rl == "rloo":
            result_E = rewards_E - (sum_E - rewards_E) / (count_E - 1)
            if options.scale_rewards == "batch":
                result_E = (result_E - _mean(result_E)) / (
                    _deviation(result_E) + SMALLEST_DEVIATION
                )
            return np.nan_to_num(result_E, nan=0.0, posinf=0.0, neginf=0.0)
        result_E = rewards_E - sum_E / count_E
        if options.scale_rewards == "group":
            squares_E = groups.sum(np.where(known_E, result_E**2, 0.0))
            result_E = result_E / (np.sqrt(squares_E / (count_E - 1)) + SMALLEST_DEVIATION)
        elif options.scale_rewards == "batch":
            result_E = result_E / (_deviation(rewards_E) + SMALLEST_DEVIATION)
    return np.nan_to_num(result_E, nan=0.0, posinf=0.0, neginf=0.0)


def token_advantages(
    texts: Texts, options: ReinforcementConfig
) -> tuple[list[Floats], list[Floats] | None]:
    """Return the advantages of all tokens, [L] per completion, and the returns (None without a
    value head).

    The reward of a token is minus ``beta`` times its divergence; the last token also gets the
    completion's reward. ppo uses the generalized advantage estimate (Schulman et al. 2016,
    arXiv:1506.02438, equation 16); its sum with the values is the return. reinforce++ sums the
    discounted rewards of this and all later tokens; if groups have several completions, the group's
    mean reward is subtracted first (Hu 2025, arXiv:2501.03262). ``--scale-rewards batch``
    normalises the advantages of either algorithm over all tokens of the step.
    """
    rewards_E = texts.rewards_E
    if options.rl == "reinforce++" and (options.num_generations or 1) > 1:
        groups, known_E = _Groups(texts.groups_E), ~np.isnan(rewards_E)
        sum_E = groups.sum(np.where(known_E, rewards_E, 0.0))
        rewards_E = rewards_E - sum_E / np.maximum(groups.sum(known_E.astype(np.float64)), 1.0)
    lengths_E = texts.lengths_E
    rewards_EL = np.zeros((len(lengths_E), max(1, lengths_E.max(initial=0))))
    if texts.divergences is not None:
        assert options.beta is not None
        rewards_EL -= options.beta * _padded(texts.divergences, rewards_EL.shape[1])
    written_E = np.flatnonzero(lengths_E)
    rewards_EL[written_E, lengths_E[written_E] - 1] += rewards_E[written_E]
    returns, values_EL, lam = None, np.zeros_like(rewards_EL), 1.0
    if texts.values is not None:
        values_EL, lam = _padded(texts.values, rewards_EL.shape[1]), options.lam
    # Without a value head, all values are 0 and lambda is 1, which sums the discounted rewards.
    result_EL = generalized_advantages(rewards_EL, values_EL, options.gamma, lam)
    if texts.values is not None:
        returns = _rows(np.nan_to_num(result_EL + values_EL, nan=0.0), lengths_E)
    rows = _rows(result_EL, lengths_E)
    if options.scale_rewards == "batch":
        rows = _normalised(rows)
    return [np.nan_to_num(row_L, nan=0.0) for row_L in rows], returns


def generalized_advantages(
    rewards_EL: Floats, values_EL: Floats, gamma: float, lam: float
) -> Floats:
    """Return the generalized advantage estimate, [E, L]: the sum over this and later tokens of
    (gamma x lambda)^distance x (reward + gamma x next value - value). Rewards and values must be 0
    after the last token of a completion."""
    result_EL, later_E = np.empty_like(rewards_EL), np.zeros(len(rewards_EL))
    next_EL = np.pad(values_EL[:, 1:], ((0, 0), (0, 1)))
    change_EL = rewards_EL + gamma * next_EL - values_EL
    for place in range(rewards_EL.shape[1] - 1, -1, -1):
        later_E = change_EL[:, place] + gamma * lam * later_E
        result_EL[:, place] = later_E
    return result_EL


def _padded(rows: Sequence[Floats], length: int) -> Floats:
    """Stack rows of different lengths into [E, L], padded with zeros on the right."""
    padded_EL = np.zeros((len(rows), length))
    for number, row_L in enumerate(rows):
        padded_EL[number, : len(row_L)] = row_L
    return padded_EL


def _rows(values_EL: Floats, lengths_E: npt.NDArray[np.int64]) -> list[Floats]:
    return [row_L[:length] for row_L, length in zip(values_EL, lengths_E, strict=True)]


def _normalised(rows: list[Floats]) -> list[Floats]:
    """Normalise all rows by the mean and standard deviation of all their values. Rows that contain
    NaN are excluded from these statistics."""
    known = [row_L for row_L in rows if not np.isnan(row_L).any()]
    numbers = np.concatenate(known) if known else np.zeros(0)
    if len(numbers) < 2:
        return rows
    factor = 1.0 / np.sqrt(numbers.var(ddof=1) + SMALLEST_VARIANCE)
    return [(row_L - numbers.mean()) * factor for row_L in rows]


def _mean(values_E: Floats) -> float:
    known = values_E[~np.isnan(values_E)]
    return float(known.mean()) if len(known) else np.nan


def _deviation(values_E: Floats) -> float:
    """Return the sample standard deviation (denominator n - 1), ignoring NaN. It is 0 for fewer
    than two values."""
    known = values_E[~np.isnan(values_E)]
    return float(known.std(ddof=1)) if len(known) > 1 else 0.0


class _Groups:
    """Sums and minima over groups, broadcast to every member of the group, [E]."""

    def __init__(self, groups_E: npt.NDArray[np.int64]) -> None:
        _, self._places_E = np.unique(groups_E, return_inverse=True)
        self._count = int(self._places_E.max()) + 1 if len(groups_E) else 0

    def sum(self, values_E: Floats) -> Floats:
        sums: Floats = np.bincount(self._places_E, values_E, self._count).astype(np.float64)
        return sums[self._places_E]

    def least(self, values_E: Floats) -> Floats:
        least = np.full(self._count, np.inf)
        np.minimum.at(least, self._places_E, values_E)
        return least[self._places_E]
