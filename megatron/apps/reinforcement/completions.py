"""Log of completions and their rewards for human readers: on the console, and as JSON lines in
``completions.jsonl``."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.apps.reinforcement.episodes import Episode
from megatron.apps.reinforcement.flags import ReinforcementConfig
from megatron.apps.reinforcement.rewards.scoring import add_failures, described, means
from megatron.training.report import say
from megatron.training.trainer import Callback, Step, Trainer
from megatron.util.processes import is_main_process

FILE = "completions.jsonl"
_SHOWN = 300


def numbers_of(
    options: ReinforcementConfig,
    episodes: Sequence[Episode],
    table: Any,
    rewards_E: npt.NDArray[np.float64],
) -> dict[str, float]:
    """Return metrics of the completions for the log, under trl's names."""
    numbers = {
        "completions/mean_length": float(np.mean([each.own_L.sum() for each in episodes])),
        "completions/clipped_ratio": float(np.mean([not each.ended for each in episodes])),
    }
    if table is None:
        return numbers
    group = options.num_generations or 1
    grouped = rewards_E.reshape(-1, len(rewards_E) if len(rewards_E) % group else group)
    known = rewards_E[~np.isnan(rewards_E)]
    numbers |= {
        "reward": float(known.mean()) if len(known) else 0.0,
        "reward_std": float(known.std()) if len(known) else 0.0,
        "frac_reward_zero_std": float(np.mean(grouped.max(axis=1) == grouped.min(axis=1))),
    }
    for name, (mean, deviation) in means(table).items():
        numbers |= {f"rewards/{name}/mean": mean, f"rewards/{name}/std": deviation}
    return numbers


class CompletionLog(Callback):
    """Callback that prints and writes completions at every log interval, and reports failed
    rewards."""

    def __init__(
        self, options: ReinforcementConfig, scorer: Any, folder: str | None, interval: int
    ) -> None:
        """Create the log.

        Args:
            scorer: this rank's :class:`~megatron.apps.reinforcement.rewards.scoring.Rewards`, or
                None.
            folder: the folder of ``--save``; None writes no file.
            interval: number of iterations between log lines."""
        self._options, self._scorer, self._interval = options, scorer, interval
        self._file = None if folder is None else Path(folder, FILE)
        self._texts: Sequence[Episode] = ()
        self._table: Any = None
        self._rewards_E: npt.NDArray[np.float64] = np.empty(0)
        self._failed: dict[str, Any] = {}

    def __exit__(self, *_: object) -> None:
        if self._scorer is not None:
            self._scorer.close()

    def before_step(self, trainer: Trainer) -> None:
        if self._scorer is not None:
            self._scorer.state = {
                "global_step": trainer.iteration,
                "max_steps": trainer.plan.train_iters,
            }

    def generated(
        self, episodes: Sequence[Episode], table: Any, rewards_E: npt.NDArray[np.float64]
    ) -> None:
        """Keep the completions and rewards of a generation until the next log line."""
        self._texts, self._table, self._rewards_E = episodes, table, rewards_E
        if table is not None:
            add_failures(self._failed, table.failures)

    def after_step(self, trainer: Trainer, step: Step) -> None:
        if step.iteration % self._interval or not is_main_process():
            return
        if self._failed:
            say(f"rl: rewards failed since the last line: {described(self._failed)}")
            self._failed.clear()
        rows = [self._row(place, step.iteration) for place in range(len(self._texts))]
        if self._options.log_completions and self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        for row in rows[: self._options.num_completions_to_print]:
            say(_line(row))

    def _row(self, place: int, iteration: int) -> dict[str, Any]:
        """Return a completion and its rewards as JSON values."""
        episode = self._texts[place]
        rewards = {}
        if self._table is not None:
            values = self._table.values_ER[place].tolist()
            rewards = {n: _known(v) for n, v in zip(self._table.names, values, strict=True)}
        text = episode.prompt.text
        return {
            "iteration": iteration,
            "record": episode.prompt.number + 1,
            "prompt": text if isinstance(text, str) else list(text),
            "completion": list(episode.turns) or episode.text,
            "reward": _known(float(self._rewards_E[place])),
            "rewards": rewards,
            "tokens": int(episode.own_L.sum()),
            "ended": episode.ended,
        }


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _line(row: dict[str, Any]) -> str:
    """Format a completion for the console, with line breaks escaped and long strings shortened."""
    parts = [f"{name} {_number(value)}" for name, value in row["rewards"].items()]
    prompt, completion = (
        text if isinstance(text, str) else "\n".join(str(turn["content"]) for turn in text)
        for text in (row["prompt"], row["completion"])
    )
    return (
        f"text of iteration {row['iteration']}: {repr(prompt[-_SHOWN:])} -> "
        f"{repr(completion[:_SHOWN])}{'' if row['ended'] else ' (cut off)'}, reward "
        f"{_number(row['reward'])} ({', '.join(parts)})"
    )


def _number(value: float | None) -> str:
    return "failed" if value is None else f"{value:g}"
