"""Metrics of predictions, in float64, and the lines that are printed of them.

Shape suffix: N examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.apps.tasks.fine_tuning.predictions import Prediction

Labels = npt.NDArray[np.integer]
Numbers = npt.NDArray[np.floating]


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


def matthews(predicted_N: Labels, labels_N: Labels) -> float:
    """Matthews' correlation coefficient, for any number of labels (Gorodkin 2004); 0 where all
    predictions, or all labels, are the same."""
    values = np.union1d(predicted_N, labels_N)
    predicted = np.array([np.sum(predicted_N == value) for value in values], np.float64)
    labels = np.array([np.sum(labels_N == value) for value in values], np.float64)
    count, correct = float(len(labels_N)), float(np.sum(predicted_N == labels_N))
    spread = (count**2 - predicted @ predicted) * (count**2 - labels @ labels)
    if spread == 0:
        return 0.0
    return float((correct * count - predicted @ labels) / math.sqrt(spread))


def pearson(predicted_N: Numbers, labels_N: Numbers) -> float:
    """Pearson's correlation coefficient; NaN where all values of one side are the same, or there
    are fewer than two."""
    a, b = (np.asarray(values, np.float64) for values in (predicted_N, labels_N))
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return math.nan
    a, b = a - a.mean(), b - b.mean()
    found = (a / np.linalg.norm(a)) @ (b / np.linalg.norm(b))
    return float(np.clip(found, -1.0, 1.0))


def spearman(predicted_N: Numbers, labels_N: Numbers) -> float:
    """Spearman's: Pearson's coefficient of the ranks, the mean rank where values are equal."""
    return pearson(_ranks(predicted_N), _ranks(labels_N))


def _ranks(values_N: Numbers) -> Numbers:
    """Ranks from 1."""
    _, inverse, counts = np.unique(values_N, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Numbers = (last - (counts - 1) / 2)[inverse]
    return ranks
