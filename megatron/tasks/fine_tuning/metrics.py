"""Accuracy and correlations of predictions with labels, in float64.

Shape suffix: N examples.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Labels = npt.NDArray[np.integer]
Numbers = npt.NDArray[np.floating]


def accuracy(predicted_N: Labels, labels_N: Labels) -> float:
    """The share of predictions that are the label."""
    return float(np.mean(predicted_N == labels_N))


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
