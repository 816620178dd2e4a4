"""What a model predicts for an example, and the file of predictions."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.util.files import write_whole


@dataclass(frozen=True)
class Prediction:
    """The prediction for one example.

    Attributes:
        predicted: the label's word as in the files, the letter of an option, a number or a text.
        label: what is right, None if that is not known.
        loss: of this example, in nats or as a squared error; None where the label is not known.
        details: further JSON values, such as the score of each label.
    """

    identity: str
    predicted: str | float
    label: Any = None
    loss: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """The values of a line of the file."""
        return {
            "id": self.identity,
            "prediction": self.predicted,
            "label": self.label,
            **self.details,
        }


def chosen(
    identities: Sequence[str],
    labels: Sequence[int | None],
    words: Sequence[str],
    logits_NL: npt.NDArray[np.float64],
) -> list[Prediction]:
    """Predictions of the label, or option, with the highest logit, the first of equal ones.
    ``words`` are those of the labels; shapes: N examples, L labels."""
    assert logits_NL.shape == (len(labels), len(words)), (logits_NL.shape, len(labels), words)
    shifted = logits_NL - logits_NL.max(axis=1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return [
        Prediction(
            identity,
            words[int(row.argmax())],
            None if label is None else words[label],
            None if label is None else -float(row[label]),
            {"log_probabilities": dict(zip(words, row.tolist(), strict=True))},
        )
        for identity, label, row in zip(identities, labels, log_probs, strict=True)
    ]


def estimated(
    identities: Sequence[str],
    labels: Sequence[float | None],
    logits_NL: npt.NDArray[np.float64],
) -> list[Prediction]:
    """Predictions of numbers, of logits [N, 1]; the loss is the squared error."""
    numbers = logits_NL.reshape(len(labels)).tolist()
    return [
        Prediction(identity, number, label, None if label is None else (number - label) ** 2)
        for identity, label, number in zip(identities, labels, numbers, strict=True)
    ]


def mean_loss(predictions: Sequence[Prediction]) -> float | None:
    """The mean of the losses; None where an example has none."""
    losses = [each.loss for each in predictions if each.loss is not None]
    if not losses or len(losses) < len(predictions):
        return None
    return math.fsum(losses) / len(losses)


def write_predictions(path: Path, sets: Mapping[str, Sequence[Prediction]]) -> None:
    """Writes a line of JSON for each prediction, with the name of its set, in the order of the
    data. The file appears when it is complete."""
    lines = (
        json.dumps({"set": name, **prediction.row()}, ensure_ascii=False)
        for name, predictions in sets.items()
        for prediction in predictions
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(f"{line}\n" for line in lines).encode())
