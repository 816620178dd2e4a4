"""Predictions of a model for examples, their scores in float64, and the console lines that show
them.

Shape suffixes: N examples, L labels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.util.files import write_whole

Labels = npt.NDArray[np.integer]
Numbers = npt.NDArray[np.floating]


@dataclass(frozen=True)
class Prediction:
    """Prediction for one example: a label as written in the files, the letter of an option, a
    number or a text. ``loss`` is in nats, or the squared error of a number. ``loss`` and ``label``
    are None if the label is unknown. ``details`` contains further JSON values, such as the score of
    each label."""

    identity: str
    predicted: str | float
    label: Any = None
    loss: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


def chosen(
    examples: Sequence[Any], words: Sequence[str], logits_NL: npt.NDArray[np.float64]
) -> list[Prediction]:
    """Return a prediction for each example: the label or option with the highest logit, the first
    in case of a tie. ``words`` contains the names of the L labels."""
    assert logits_NL.shape == (len(examples), len(words)), (logits_NL.shape, len(examples), words)
    shifted = logits_NL - logits_NL.max(axis=1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return [
        Prediction(
            example.identity,
            words[int(row.argmax())],
            None if example.label is None else words[example.label],
            None if example.label is None else -float(row[example.label]),
            {"log_probabilities": dict(zip(words, row.tolist(), strict=True))},
        )
        for example, row in zip(examples, log_probs, strict=True)
    ]


def estimated(examples: Sequence[Any], logits_N1: npt.NDArray[np.float64]) -> list[Prediction]:
    """Return a predicted number for each example. The loss is the squared error."""
    return [
        Prediction(
            each.identity, number, each.label,
            None if each.label is None else (number - each.label) ** 2,
        )
        for each, number in zip(examples, logits_N1.reshape(-1).tolist(), strict=True)
    ]  # fmt: skip


def mean_loss(predictions: Sequence[Prediction]) -> float | None:
    """Return the mean loss, or None if there are no predictions or one has no loss."""
    losses = [each.loss for each in predictions if each.loss is not None]
    if not losses or len(losses) < len(predictions):
        return None
    return math.fsum(losses) / len(losses)


def write_predictions(path: Path, sets: Mapping[str, Sequence[Prediction]]) -> None:
    """Write one line of JSON per prediction, with the name of its validation set, in the order of
    the data. The file appears only when it is complete."""
    rows = (
        {"set": name, "id": each.identity, "prediction": each.predicted, "label": each.label}
        | dict(each.details)
        for name, predictions in sets.items()
        for each in predictions
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_whole(path, "".join(lines).encode())


@dataclass(frozen=True)
class Scores:
    """Scores by name. The first one is used to compare epochs; higher is better. ``shown`` is the
    text that the console line shows for them."""

    values: Mapping[str, float]
    shown: str

    @property
    def compared(self) -> tuple[str, float]:
        """Name and value of the score by which epochs are compared."""
        return next(iter(self.values.items()))


def accuracy_scores(predictions: Sequence[Prediction]) -> Scores:
    correct = sum(each.predicted == each.label for each in predictions)
    total = len(predictions)
    shown = f"correct / total = {correct} / {total} = {100.0 * correct / total:.4f} %,"
    return Scores({"accuracy": correct / total}, shown)


def matthews_scores(predictions: Sequence[Prediction]) -> Scores:
    value = matthews(*_columns(predictions))
    accuracy = accuracy_scores(predictions).values
    return Scores({"matthews": value, **accuracy}, f"mcc = {value} ,")


def correlation_scores(predictions: Sequence[Prediction]) -> Scores:
    columns = _columns(predictions)
    linear, ranked = pearson(*columns), spearman(*columns)
    mean = (linear + ranked) / 2
    shown = f"pearson = {linear} spearmanr = {ranked} corr = {mean}"
    return Scores({"correlation": mean, "pearson": linear, "spearman": ranked}, shown)


SCORERS: dict[str, Callable[[Sequence[Prediction]], Scores]] = {
    "accuracy": accuracy_scores,
    "matthews": matthews_scores,
    "correlation": correlation_scores,
}
"""Scoring functions by metric. Each requires at least one prediction, all with known labels."""


def set_line(epoch: int, name: str, scores: Scores, seconds: float) -> str:
    """Return the console line of one validation set. Epochs count from 0; -1 means no training."""
    words = f"{scores.shown} elapsed time (sec): {seconds:.3f}"
    return f" > |epoch: {epoch}| metrics for {name}: {words}"


def overall_line(epoch: int, scores: Scores) -> str:
    """Return the console line for all validation sets together."""
    return f" >> |epoch: {epoch}| overall: {scores.shown.rstrip(' ,')}"


def _columns(predictions: Sequence[Prediction]) -> tuple[np.ndarray[Any, Any], ...]:
    return (
        np.array([each.predicted for each in predictions]),
        np.array([each.label for each in predictions]),
    )


def matthews(predicted_N: Labels, labels_N: Labels) -> float:
    """Compute the Matthews correlation coefficient for any number of labels (Gorodkin 2004). Return
    0 if all predictions, or all labels, are equal."""
    values = np.union1d(predicted_N, labels_N)
    predicted = np.array([np.sum(predicted_N == value) for value in values], np.float64)
    labels = np.array([np.sum(labels_N == value) for value in values], np.float64)
    count, correct = float(len(labels_N)), float(np.sum(predicted_N == labels_N))
    spread = (count**2 - predicted @ predicted) * (count**2 - labels @ labels)
    if spread == 0:
        return 0.0
    return float((correct * count - predicted @ labels) / math.sqrt(spread))


def pearson(predicted_N: Numbers, labels_N: Numbers) -> float:
    """Compute Pearson's correlation coefficient. Return NaN if all values of one argument are
    equal, or if there are fewer than two values."""
    a, b = (np.asarray(values, np.float64) for values in (predicted_N, labels_N))
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return math.nan
    a, b = a - a.mean(), b - b.mean()
    correlation = (a / np.linalg.norm(a)) @ (b / np.linalg.norm(b))
    return float(np.clip(correlation, -1.0, 1.0))


def spearman(predicted_N: Numbers, labels_N: Numbers) -> float:
    """Compute Spearman's correlation coefficient: Pearson's coefficient of the ranks."""
    return pearson(_ranks(predicted_N), _ranks(labels_N))


def _ranks(values_N: Numbers) -> Numbers:
    """Return the ranks, from 1; tied values share their mean rank."""
    _, inverse, counts = np.unique(values_N, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Numbers = (last - (counts - 1) / 2)[inverse]
    return ranks
