"""What a fine-tuned task is: its settings, samples, predictions and scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.apps.tasks.config import TaskConfig
from megatron.apps.tasks.fine_tuning.metrics import Scores
from megatron.apps.tasks.fine_tuning.predictions import Prediction, write_predictions
from megatron.config import ConfigError, RunConfig, Settings
from megatron.data.samples import SampleDataset
from megatron.model.spec import Measure
from megatron.tokenizer import Tokenizer

Numbers = Mapping[str, npt.NDArray[np.float64]]
"""What :func:`megatron.training.measuring.measure_samples` returns."""


@dataclass(frozen=True)
class TaskRun:
    """What samples are made with: the configuration of a run, its tokenizer, the task's flags."""

    config: RunConfig
    tokenizer: Tokenizer
    task: TaskConfig


@dataclass(frozen=True)
class TrainingSamples:
    """What is trained on, and the collator of its batches."""

    dataset: SampleDataset[Any]
    collate: Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class HeldOutSamples:
    """What is evaluated on.

    Attributes:
        samples: one or several for each example.
        lengths: tokens of each sample, see ``measure_samples``, which calls ``collate``.
        predictions: of the measure's numbers for every sample, one for each example.
        training: the same samples as they are trained on, for the loss of ``--eval-interval``; None
            where labels are missing.
    """

    samples: SampleDataset[Any] | Sequence[Any]
    lengths: Sequence[int] | npt.NDArray[np.int64]
    collate: Callable[..., Any]
    measure: Measure
    predictions: Callable[[Numbers], list[Prediction]]
    training: SampleDataset[Any] | None

    @property
    def tokens(self) -> int:
        """Tokens of all samples, without padding."""
        return int(np.sum(self.lengths))


def require_labels(examples: Sequence[Any]) -> None:
    """Raises ConfigError if an example to train on has no label."""
    missing = next((each for each in examples if each.label is None), None)
    if missing is not None:
        raise ConfigError(
            f"--train-data: {missing.identity} has no label; a test file cannot be trained on"
        )


class FineTuning(ABC):
    """A task on which a model is fine-tuned. Examples are what :meth:`read` makes of a file, before
    there is a tokenizer."""

    name: str
    folders: bool = False
    """Whether data are folders."""
    predictions_suffix: str = ".jsonl"
    """Of the file of predictions, where it is not named."""

    @abstractmethod
    def settings(self) -> Settings:
        """What the model must be, by field of ``ModelFlags``."""

    @abstractmethod
    def read(self, path: Path) -> list[Any]:
        """The examples of a file or folder, at least one. Raises ConfigError, with file and line,
        if it cannot be used."""

    @abstractmethod
    def training_samples(self, examples: Sequence[Any], run: TaskRun) -> TrainingSamples:
        """Examples as samples. Raises ConfigError, with file and line, if one has no label."""

    @abstractmethod
    def held_out_samples(self, examples: Sequence[Any], run: TaskRun) -> HeldOutSamples:
        """Examples as samples, and predictions of them."""

    @abstractmethod
    def scores(self, predictions: Sequence[Prediction]) -> Scores:
        """Scores of at least one prediction, of which the labels are known."""

    def write_predictions(self, path: Path, sets: Mapping[str, Sequence[Prediction]]) -> None:
        """Writes the predictions of validation sets by name."""
        write_predictions(path, sets)
