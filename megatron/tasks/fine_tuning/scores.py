"""Scores of predictions, and the lines that are printed of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.tasks.fine_tuning.metrics import matthews, pearson, spearman
from megatron.tasks.fine_tuning.predictions import Prediction


@dataclass(frozen=True)
class Scores:
    """Scores by name, the first of which compares epochs, higher being better; ``shown`` are the
    words of the printed lines, up to the elapsed time."""

    values: Mapping[str, float]
    shown: str

    @property
    def compared(self) -> tuple[str, float]:
        """Name and value of the score that compares epochs."""
        return next(iter(self.values.items()))


Scorer = Callable[[Sequence[Prediction]], Scores]
"""Scores predictions whose labels are known, at least one."""


def accuracy_scores(predictions: Sequence[Prediction]) -> Scores:
    """Counts of right predictions."""
    correct = sum(each.predicted == each.label for each in predictions)
    total = len(predictions)
    shown = f"correct / total = {correct} / {total} = {100.0 * correct / total:.4f} %,"
    return Scores({"accuracy": correct / total}, shown)


def matthews_scores(predictions: Sequence[Prediction]) -> Scores:
    """Matthews' correlation, and the accuracy."""
    value = matthews(*_columns(predictions))
    accuracy = accuracy_scores(predictions).values
    return Scores({"matthews": value, **accuracy}, f"mcc = {value} ,")


def correlation_scores(predictions: Sequence[Prediction]) -> Scores:
    """Pearson's and Spearman's correlation and their mean, which compares epochs."""
    columns = _columns(predictions)
    linear, ranked = pearson(*columns), spearman(*columns)
    mean = (linear + ranked) / 2
    shown = f"pearson = {linear} spearmanr = {ranked} corr = {mean}"
    return Scores({"correlation": mean, "pearson": linear, "spearman": ranked}, shown)


SCORERS: dict[str, Scorer] = {
    "accuracy": accuracy_scores,
    "matthews": matthews_scores,
    "correlation": correlation_scores,
}
"""By the score that compares epochs."""


def set_line(epoch: int, name: str, scores: Scores, seconds: float) -> str:
    """The line of one validation set; epochs count from 0, -1 without training."""
    words = f"{scores.shown} elapsed time (sec): {seconds:.3f}"
    return f" > |epoch: {epoch}| metrics for {name}: {words}"


def overall_line(epoch: int, scores: Scores) -> str:
    """The line of all validation sets together."""
    return f" >> |epoch: {epoch}| overall: {scores.shown.rstrip(' ,')}"


def _columns(predictions: Sequence[Prediction]) -> tuple[np.ndarray[Any, Any], ...]:
    return (
        np.array([each.predicted for each in predictions]),
        np.array([each.label for each in predictions]),
    )
