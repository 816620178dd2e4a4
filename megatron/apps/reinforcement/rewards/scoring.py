"""Rewards of episodes from all of a run's sources, combined in one table."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.apps.reinforcement.episodes import Episode
from megatron.apps.reinforcement.flags import ReinforcementConfig
from megatron.apps.reinforcement.rewards.confinement import LIMITS, Limits
from megatron.apps.reinforcement.rewards.keepers import Keepers, limits_of
from megatron.apps.reinforcement.rewards.sources import Reward, RewardSource, sources_of
from megatron.config import ConfigError, RunConfig
from megatron.util.digests import digest

ENVIRONMENT, MODEL = "environment", "reward model"
_KEPT = 1 << 16
_PROBED: dict[Limits, dict[str, Any]] = {}
"""Results of probing this node, by limits. Each process probes only once per set of limits."""


class Failures(NamedTuple):
    """Failed rewards of one source.

    Attributes:
        texts: number of completions whose reward failed.
        first: message of the first failure.
    """

    texts: int
    first: str


def add_failures(known: dict[str, Failures], more: Mapping[str, Failures]) -> None:
    """Add failures to ``known``, in place, by source name. The first message is kept."""
    for name, each in more.items():
        before = known.get(name, Failures(0, each.first))
        known[name] = Failures(before.texts + each.texts, before.first)


class RewardTable(NamedTuple):
    """Rewards of E episodes from R sources.

    Attributes:
        names: names of the sources.
        weights_R: weights of the sources, float64.
        values_ER: rewards, float64; NaN if a reward failed or a source has none for an episode.
        failures: failed rewards by source name.
    """

    names: tuple[str, ...]
    weights_R: npt.NDArray[np.float64]
    values_ER: npt.NDArray[np.float64]
    failures: Mapping[str, Failures]


def combined(table: RewardTable) -> npt.NDArray[np.float64]:
    """Return the weighted sum of each episode's available rewards, float64 [E], as in trl (1.16),
    or NaN if no reward is available."""
    known_ER = np.isfinite(table.values_ER)
    sums_E = np.where(known_ER, table.values_ER, 0.0) @ table.weights_R
    return np.where(known_ER.any(axis=1), sums_E, np.nan)


def merged(tables: Sequence[RewardTable]) -> RewardTable:
    """Concatenate the tables of several ranks, in rank order."""
    failures: dict[str, Failures] = {}
    for table in tables:
        add_failures(failures, table.failures)
    first = tables[0]
    values_ER = np.concatenate([table.values_ER for table in tables])
    return RewardTable(first.names, first.weights_R, values_ER, failures)


def with_model(table: RewardTable, rewards_E: npt.NDArray[np.float64]) -> RewardTable:
    """Return the table with the reward model's column filled in. ``rewards_E`` must be equal on all
    ranks."""
    values_ER, failures = table.values_ER.copy(), dict(table.failures)
    good_E = np.isfinite(rewards_E)
    values_ER[:, table.names.index(MODEL)] = np.where(good_E, rewards_E, np.nan)
    if not good_E.all():
        first = f"gave {rewards_E[~good_E][0]} instead of a number"
        failures[MODEL] = Failures(int((~good_E).sum()), first)
    return table._replace(values_ER=values_ER, failures=failures)


def joined(
    options: ReinforcementConfig,
    tables: Sequence[RewardTable],
    places: npt.NDArray[np.int64],
    judged_E: npt.NDArray[np.float64] | None,
) -> tuple[RewardTable, npt.NDArray[np.float64]]:
    """Merge the tables of several ranks. Return the table and the weighted sum of each row.
    ``places`` sorts the rows into sample order. ``judged_E`` contains the reward model's rewards,
    if any. Raises RewardsFailedError if too many rewards failed."""
    table = merged(tables)
    table = table._replace(values_ER=table.values_ER[places])
    table = table if judged_E is None else with_model(table, judged_E)
    check_failures(table, options.reward_failures)
    return table, combined(table)


def means(table: RewardTable) -> dict[str, tuple[float, float]]:
    """Return the mean and standard deviation of each source's available rewards. Sources without
    available rewards are left out."""
    known = zip(table.names, (row[~np.isnan(row)] for row in table.values_ER.T), strict=True)
    return {name: (float(row.mean()), float(row.std())) for name, row in known if len(row)}


def check_failures(table: RewardTable, most: float) -> None:
    """Raise RewardsFailedError if the fraction of failed rewards exceeds ``most``."""
    failed = sum(failures.texts for failures in table.failures.values())
    if failed > most * table.values_ER.size:
        raise RewardsFailedError(
            f"{failed} of {table.values_ER.size} rewards failed, more than --reward-failures "
            f"{most:g} allows: {described(table.failures)}"
        )


def described(failures: Mapping[str, Failures]) -> str:
    """Format failures as a line for the log."""
    return "; ".join(
        f"{name}: {failed.texts} x, the first {failed.first}" for name, failed in failures.items()
    )


class RewardsFailedError(ValueError):
    """Raised if too many rewards of a step failed."""


class Rewards:
    """Reward sources of a run, and the processes that compute rewards on this rank."""

    def __init__(self, options: ReinforcementConfig, sources: Sequence[RewardSource]) -> None:
        self.options, self.sources = options, sources
        self.keepers = Keepers(options.reward_workers, limits_of(options))
        self.state: Mapping[str, Any] = {}
        """Training progress, which reward functions receive as trl's ``trainer_state``."""
        self.environments: Any = None
        """Environments of the run, or None. Their failures are counted, too."""
        self._known: OrderedDict[str, float | None] = OrderedDict()

    @classmethod
    def of(cls, config: RunConfig, run: Any = None) -> Rewards:
        """Create the rewards of a run. Raises ConfigError if a source cannot be used, or if this
        node does not enforce a limit."""
        options = config.section(ReinforcementConfig)
        rewards = cls(options, sources_of(options))
        try:
            rewards.check()
        except BaseException:
            rewards.close()
            raise
        return rewards

    def check(self) -> None:
        """Raise ConfigError if a source cannot be used, or if this node does not enforce a
        limit."""
        if not self.sources:
            return
        limits = self.keepers.limits
        if limits not in _PROBED:
            _PROBED[limits] = self.keepers.ask({"kind": "probe"})
        answer = _PROBED[limits]
        for name in LIMITS:
            problem = answer.get(name, answer.get("failure"))
            if problem and name not in self.keepers.limits.allowed:
                raise ConfigError(
                    f"--reward-funcs {' '.join(self.options.reward_funcs)}: this node does not "
                    f"limit the {name} of their processes: {problem}; run on a kernel that does "
                    f"(docs/guides/reinforcement.md), or trust them by --reward-allow {name}"
                )
        for source, text in zip(self.sources, self.options.reward_funcs, strict=True):
            if problem := source.check(self.keepers):
                raise ConfigError(f"--reward-funcs {text} {problem}")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of a reward table's columns."""
        options, names = self.options, [source.name for source in self.sources]
        names += [MODEL] * (options.reward_model is not None)
        return (*names, *[ENVIRONMENT] * (options.environment is not None))

    @property
    def weights_R(self) -> npt.NDArray[np.float64]:
        """Weights of a reward table's columns. An environment has the weight 1."""
        weights = list(self.options.reward_weights)
        return np.array((weights + [1.0] * len(self.names))[: len(self.names)], np.float64)

    def score(self, episodes: Sequence[Episode]) -> RewardTable:
        """Compute the rewards of this rank's episodes. The reward model's column stays NaN until
        :func:`with_model` fills it in."""
        values_ER = np.full((len(episodes), len(self.names)), np.nan)
        failures: dict[str, Failures] = {}
        for place, source in enumerate(self.sources):
            for row, reward in enumerate(self._scored(source, episodes)):
                if isinstance(reward, str):
                    add_failures(failures, {source.name: Failures(1, reward)})
                elif reward is not None:
                    values_ER[row, place] = reward
        if ENVIRONMENT in self.names:
            given = [math.nan if e.reward is None else e.reward for e in episodes]
            values_ER[:, self.names.index(ENVIRONMENT)] = given
            count = sum(e.reward is not None and math.isnan(e.reward) for e in episodes)
            if count:
                said = list(self.environments.failures) if self.environments else []
                failures[ENVIRONMENT] = Failures(count, (*said, "failed")[0])
        if self.environments is not None:
            self.environments.failures.clear()
        return RewardTable(self.names, self.weights_R, values_ER, failures)

    def _scored(self, source: RewardSource, episodes: Sequence[Episode]) -> list[Reward]:
        keeps = self.options.reward_cache and source.identity is not None
        if not keeps:
            return source.score(episodes, self.keepers, self.state)
        keys = [_key(source, episode) for episode in episodes]
        # Score equal completions only once.
        unknown = {key: e for key, e in zip(keys, episodes, strict=True) if key not in self._known}
        scored = source.score(list(unknown.values()), self.keepers, self.state) if unknown else []
        failed: dict[str, Reward] = {}
        for key, reward in zip(unknown, scored, strict=True):
            if isinstance(reward, str):
                failed[key] = reward
            else:
                self._known[key] = reward
        rewards: list[Reward] = []
        for key in keys:
            if key in failed:
                rewards.append(failed[key])
            else:
                self._known.move_to_end(key)
                rewards.append(self._known[key])
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return rewards

    def close(self) -> None:
        """End the processes of rewards and environments."""
        self.keepers.close()
        if self.environments is not None:
            self.environments.close()


def _key(source: RewardSource, episode: Episode) -> str:
    """Return a cache key for a source and everything in an episode that it may read."""
    prompt = episode.prompt
    content = [source.identity, prompt.text, episode.text, episode.turns, prompt.columns]
    text = json.dumps(content, sort_keys=True, default=str)
    return digest(text.encode() + episode.tokens_L.tobytes())
