"""Evaluation results, and how they are reported."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


class Reported(Protocol):
    """Evaluation result in the form that the console and the writers need."""

    @property
    def iteration(self) -> int:
        """Number of steps trained before the evaluation."""

    @property
    def kind(self) -> str:
        """Kind of the row in which writers record the values."""

    def line(self) -> str:
        """Return the console line."""

    def row(self) -> dict[str, float | None]:
        """Return the values by name, for writers."""


@dataclass(frozen=True)
class Evaluation:
    """Losses on held-out data after ``iteration`` steps: means over micro batches and ranks.
    ``name`` is the data set's name, or "valid" or "test" if it is the only one. ``no_perplexity``
    lists losses that are not cross entropies. ``loss`` is the minimised loss, if not included."""

    iteration: int
    losses: Mapping[str, float]
    name: str = "valid"
    test: bool = False
    no_perplexity: frozenset[str] = frozenset()
    loss: float | None = None

    @property
    def kind(self) -> str:
        """Kind of the row in which writers record the values."""
        kind = "test" if self.test else "validation"
        return kind if self.name in ("valid", "test") else f"{kind} {self.name}"

    def line(self) -> str:
        """Return the console line, worded as in Megatron since scripts search for its text."""
        where = f"iteration {self.iteration}" + (" on test set" if self.test else "")
        where += "" if self.name in ("valid", "test") else f" on {self.name}"
        ppl = self._perplexities()
        values = "".join(
            f"{name} value: {loss:.6E} | "
            + (f"{name} PPL: {ppl[name]:.6E} | " if name in ppl else "")
            for name, loss in self.losses.items()
        )
        return f" validation loss at {where} | {values}".rstrip()

    def row(self) -> dict[str, float | None]:
        """Return the values by name, for writers. If there is one loss, it is named ``loss``."""
        ppl = self._perplexities()
        if len(self.losses) == 1:
            ((name, loss),) = self.losses.items()
            return {"loss": loss, **({"perplexity": ppl[name]} if ppl else {})}
        total = {} if self.loss is None else {"loss": self.loss}
        return {**total, **self.losses, **{f"{name} PPL": value for name, value in ppl.items()}}

    def _perplexities(self) -> dict[str, float]:
        with_one = (name for name in self.losses if name not in self.no_perplexity)
        return {name: perplexity(self.losses[name]) for name in with_one}


def perplexity(loss: float) -> float:
    """Return exp(loss). The loss is limited to 20, as in Megatron, to avoid an overflow."""
    return math.nan if math.isnan(loss) else math.exp(min(20.0, loss))
