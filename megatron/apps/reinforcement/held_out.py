"""Evaluation of a policy: rewards of its completions of held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.apps.reinforcement.data.prompts import PromptBatch
from megatron.apps.reinforcement.episodes import Episode, EpisodeBatch, Prompt
from megatron.apps.reinforcement.kept import RatedText
from megatron.apps.reinforcement.loop import ReinforcementLoop
from megatron.apps.reinforcement.rewards.scoring import means
from megatron.data.samples import SampleDataset
from megatron.parallel.mesh import Mesh
from megatron.training.trainer import Callback, Trainer

Floats = npt.NDArray[np.float64]
Written = tuple[dict[int, Episode], Any, Floats]
Write = Callable[[dict[int, Prompt], dict[int, int]], Written]
"""Function that completes this replica's prompts. Given prompts and draw numbers by sample, it
returns the completions of all replicas, their reward table, and their rewards; see
``ReinforcementLoop.written``."""
FIRST_DRAW = 2**41
"""First draw number of evaluations. All evaluations use the same numbers, which no training sample
uses."""


def answered(loop: ReinforcementLoop, batches: Sequence[PromptBatch]) -> list[EpisodeBatch]:
    """Complete held-out prompts, and return micro batches. Collective: every rank must call it."""
    own = {n: each for batch in batches for each, n in zip(*batch, strict=True)}
    texts, _, _ = loop.written(own, {n: FIRST_DRAW + n for n in own})
    written = [RatedText(n, each, np.zeros(each.own_L.sum())) for n, each in texts.items()]
    return loop.micro_batches(written, batches)


@dataclass(frozen=True)
class HeldOutRewards:
    """Metrics of the completions of ``prompts`` held-out prompts; see
    :class:`~megatron.training.metrics.Reported`."""

    iteration: int
    name: str
    values: Mapping[str, float]
    prompts: int
    test: bool = False

    @property
    def kind(self) -> str:
        """Name under which writers log the values."""
        kind = "test" if self.test else "validation"
        return kind if self.name in ("valid", "test") else f"{kind} {self.name}"

    @property
    def minimised(self) -> float | None:
        """Negated mean reward, for ``--keep-best``. None on a test set or without rewards."""
        return None if self.test or "reward" not in self.values else -self.values["reward"]

    def line(self) -> str:
        """Return the line for the console."""
        values = " | ".join(f"{name}: {value:.6E}" for name, value in self.values.items())
        where = f"{self.kind} rewards at iteration {self.iteration}"
        return f"{where} | {values} | {self.prompts} texts"

    def row(self) -> dict[str, float | None]:
        """Return the values by name, for writers."""
        return dict(self.values)


@dataclass
class HeldOutTexts(Callback):
    """Callback that completes the held-out prompts whenever an evaluation is due.

    Attributes:
        count: maximum number of prompts per evaluation.
        success: minimum reward of a good completion.
    """

    write: Write
    valid: Mapping[str, SampleDataset[Any]]
    test: Mapping[str, SampleDataset[Any]]
    count: int
    success: float
    mesh: Mesh
    _at: int | None = field(default=None)

    def evaluate(self, trainer: Trainer, last: bool) -> None:
        due = trainer.plan.evaluates_after(trainer.iteration)
        if (last or due) and self._at != trainer.iteration:
            self._at = trainer.iteration
            trainer.settle()
            for name, prompts in self.valid.items():
                trainer.report(self._measured(trainer.iteration, name, prompts))
        if last:
            for name, prompts in self.test.items():
                trainer.report(self._measured(trainer.iteration, name, prompts, test=True))

    def _measured(
        self, iteration: int, name: str, dataset: SampleDataset[Any], test: bool = False
    ) -> HeldOutRewards:
        count = min(self.count, len(dataset))
        data = self.mesh.samples
        own = {n: dataset[n].prompt for n in range(data.rank, count, data.size)}
        texts, table, rewards_E = self.write(own, {n: FIRST_DRAW + n for n in own})
        known_E = rewards_E[~np.isnan(rewards_E)]
        values: dict[str, float] = {}
        if len(known_E):
            values["reward"] = float(known_E.mean())
            values["success"] = float(np.mean(known_E >= self.success))
        if table is not None:
            values |= {f"rewards/{name}/mean": mean for name, (mean, _) in means(table).items()}
        lengths = [int(text.own_L.sum()) for text in texts.values()]
        values["completions/mean_length"] = float(np.mean(lengths))
        return HeldOutRewards(iteration, name, values, len(texts), test)
