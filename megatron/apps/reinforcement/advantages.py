"""Advantages: by how much a text, or one of its tokens, is better than average. Every rank has the
values of all texts of a step, in the order of samples: no number depends on the layout. A text that
could not be scored has a reward of NaN: it is excluded from all means, and its advantage is 0.

Shapes: E texts of a step, L tokens of a text that the policy drew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.apps.reinforcement.flags import ReinforcementConfig

Floats = npt.NDArray[np.float64]

SMALLEST_DEVIATION, SMALLEST_VARIANCE = 1e-4, 1e-8
"""Addends of a standard deviation of rewards, and of a variance of tokens, as in trl."""


class Texts(NamedTuple):
    """Texts of a step before training on them.

    Attributes:
        rewards_E: NaN for texts that were not scored.
        groups_E: number of each one's group, int64.
        lengths_E: tokens of the policy.
        ended_E: False for texts that were cut off.
        divergences: of each a float64 [L]: the estimate of the divergence from the reference
            model, where it belongs to the rewards; else None.
        values: of each a float64 [L]: what a value head expects before each token; else None.
    """

    rewards_E: Floats
    groups_E: npt.NDArray[np.int64]
    lengths_E: npt.NDArray[np.int64]
    ended_E: npt.NDArray[np.bool_]
    divergences: Sequence[Floats] | None = None
    values: Sequence[Floats] | None = None


class TextAdvantages(NamedTuple):
    """Advantages of the texts of a step.

    Attributes:
        advantages: of each text a float64 [L].
        returns: of each text a float64 [L], the value head's targets; None without a value head.
        rewards_E: with penalties and, without a value head, the divergence.
        kept_E: False for texts whose tokens do not count in the loss.
    """

    advantages: list[Floats]
    returns: list[Floats] | None
    rewards_E: Floats
    kept_E: npt.NDArray[np.bool_]


def estimate(texts: Texts, options: ReinforcementConfig) -> TextAdvantages:
    """Advantages of all texts of a step by the algorithm of a run."""
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
    """Rewards within their range, less the penalties of long texts, [E]."""
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
    """Share of the penalty of each text, [E]: 0 up to ``longest`` - ``buffer`` tokens, from there
    linear to 1 (Yu et al. 2025, arXiv:2503.14476, equation 13)."""
    return np.clip((lengths_E - (longest - buffer)) / buffer, 0.0, 1.0)


def all_equal(rewards_E: Floats, groups_E: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """True for the texts of groups in which no two rewards differ, NaN left out, [E]."""
    groups = _Groups(groups_E)
    known_E = ~np.isnan(rewards_E)
    low_E = groups.least(np.where(known_E, rewards_E, np.inf))
    high_E = -groups.least(np.where(known_E, -rewards_E, np.inf))
    return low_E >= high_E


def advantages(
    rewards_E: Floats, groups_E: npt.NDArray[np.int64], options: ReinforcementConfig
) -> Floats:
    """The advantage of each text, [E], where all of its tokens have the same.

    The reward less the mean of its group, over the standard deviation of the group's or of all
    rewards (Shao et al. 2024, arXiv:2402.03300, section 4.1.2; Liu et al. 2025, arXiv:2508.08221).
    ``--rl rloo``: the reward less the mean of the others of its group (Ahmadian et al. 2024,
    arXiv:2402.14740, equation 8), with ``--scale-rewards batch`` then normalised over all texts.
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
    """Advantages of tokens, [L] of each text, and returns, where there are values.

    The reward of a token is minus ``beta`` times its divergence; the last token also gets the
    text's reward. ppo: the generalized advantage estimate (Schulman et al. 2016, arXiv:1506.02438,
    equation 16), whose sum with the values is the return. reinforce++: the sum of this and later
    rewards, of groups less their mean reward (Hu 2025, arXiv:2501.03262). Both with
    ``--scale-rewards batch`` normalised over all tokens of the step.
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
    # Without a value head every value is 0, and lambda 1 sums the rewards.
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
    """Sum over this and later tokens of (gamma x lambda)^distance x (reward + gamma x next value -
    value), [E, L]; after the last token of a text rewards and values are 0."""
    result_EL, later_E = np.empty_like(rewards_EL), np.zeros(len(rewards_EL))
    next_EL = np.pad(values_EL[:, 1:], ((0, 0), (0, 1)))
    change_EL = rewards_EL + gamma * next_EL - values_EL
    for place in range(rewards_EL.shape[1] - 1, -1, -1):
        later_E = change_EL[:, place] + gamma * lam * later_E
        result_EL[:, place] = later_E
    return result_EL


def _padded(rows: Sequence[Floats], length: int) -> Floats:
    """Rows with zeros after their ends, [E, L]."""
    padded_EL = np.zeros((len(rows), length))
    for number, row_L in enumerate(rows):
        padded_EL[number, : len(row_L)] = row_L
    return padded_EL


def _rows(values_EL: Floats, lengths_E: npt.NDArray[np.int64]) -> list[Floats]:
    return [row_L[:length] for row_L, length in zip(values_EL, lengths_E, strict=True)]


def _normalised(rows: list[Floats]) -> list[Floats]:
    """Rows less the mean over the numbers of all, over the root of their variance. Rows with a NaN
    count in neither."""
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
    """The standard deviation, of n values with n - 1, NaN left out."""
    known = values_E[~np.isnan(values_E)]
    return float(known.std(ddof=1)) if len(known) > 1 else 0.0


class _Groups:
    """Return sums and minima over groups, for each text of the group, [E]."""

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
