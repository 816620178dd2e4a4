"""Curriculum that orders prompts by their success rate, the fraction of good completions.

About half of the groups, chosen at random, use the next prompt of the data, so that all prompts
recur. The other groups sample among the prompts that already have completions, with the weights

    1 - ((share - target) / max(target, 1 - target)) ** 2

where share is the success rate. For a target of 1/2 they are four times the variance of success, a
measure of how much can be learned from a prompt (Foster, Foerster 2025, arXiv:2502.12272). A draw
depends only on the seed, the group number and the success rates before its generation, so that all
ranks agree.
"""

from __future__ import annotations

import base64
import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.apps.reinforcement.data.prompts import RepeatedPrompts
from megatron.apps.reinforcement.episodes import Episode, Prompt
from megatron.apps.reinforcement.flags import ReinforcementConfig

_OF_ORDER = 0.5
"""Fraction of groups that use the data's next prompt."""
_STREAM = zlib.crc32(b"curriculum")


class SuccessCurriculum:
    """Success rates of prompts, and the sampling of prompts according to them.

    Attributes:
        shares_N: success rate of each record, float64; NaN before its first completions.
    """

    def __init__(self, options: ReinforcementConfig, prompts: RepeatedPrompts, seed: int) -> None:
        self._options, self._prompts, self._seed = options, prompts, seed
        self.shares_N: npt.NDArray[np.float64] = np.full(prompts.records, np.nan)

    def prompt(self, group: int, prompt: Prompt) -> Prompt:
        """Return the prompt to use for a group. ``prompt`` is the group's prompt in data order."""
        rng = np.random.default_rng([self._seed, _STREAM, group])
        if rng.random() < _OF_ORDER:
            return prompt
        known = np.flatnonzero(~np.isnan(self.shares_N))
        weights = self.weights(self.shares_N[known])
        total = float(weights.sum())
        if total <= 0:
            return prompt
        place = int(np.searchsorted(np.cumsum(weights), rng.random() * total, side="right"))
        return self._record(int(known[min(place, len(known) - 1)]))

    def weights(self, shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the sampling weights, from 0 to 1, of prompts with these success rates."""
        target = self._options.curriculum_target
        return 1.0 - np.square((shares - target) / max(target, 1.0 - target))

    def generated(
        self, episodes: Sequence[Episode], table: Any, rewards_E: npt.NDArray[np.float64]
    ) -> None:
        """Update the success rates from the rewards of whole groups, in sample order."""
        size, decay = self._options.num_generations or 1, self._options.curriculum_decay
        for start in range(0, len(episodes), size):
            rewards = rewards_E[start : start + size]
            rewards = rewards[~np.isnan(rewards)]
            number = episodes[start].prompt.number
            if not len(rewards) or not 0 <= number < len(self.shares_N):
                continue
            share = float(np.mean(rewards >= self._options.curriculum_success))
            known = float(self.shares_N[number])
            self.shares_N[number] = (
                share if np.isnan(known) else decay * known + (1.0 - decay) * share
            )

    def _record(self, number: int) -> Prompt:
        first = max(first for first in self._prompts.files if first <= number)
        prompt = self._prompts.files[first].prompt(number - first)
        return dataclasses.replace(prompt, number=number)

    def state(self) -> dict[str, Any]:
        """Return the success rates for a checkpoint, without loss of precision."""
        content = base64.b64encode(self.shares_N.astype("<f8").tobytes()).decode()
        return {"records": len(self.shares_N), "shares": content}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the success rates from a checkpoint. Raises ValueError if they belong to other
        data."""
        if state["records"] != len(self.shares_N):
            raise ValueError(
                f"--rl-curriculum success: the checkpoint has the shares of {state['records']} "
                f"records, and the data have {len(self.shares_N)}: give the data of before, or "
                "--rl-curriculum none"
            )
        self.shares_N = np.frombuffer(base64.b64decode(state["shares"]), "<f8").copy()


def repeated_prompts(dataset: Any) -> RepeatedPrompts:
    """Return the repeated prompts inside the wrappers that reorder them for a run."""
    while not isinstance(dataset, RepeatedPrompts):
        dataset = dataset.dataset
    return dataset
