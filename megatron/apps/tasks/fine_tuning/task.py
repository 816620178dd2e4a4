"""Base classes of fine-tuning tasks (settings, samples, predictions and scores), and the shuffled
order of training samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from megatron.apps.tasks.fine_tuning.examples import RaceTask, TableTask
from megatron.apps.tasks.fine_tuning.scores import SCORERS, Prediction, Scores, write_predictions
from megatron.config import ConfigError, Settings
from megatron.data.samples import RenumberedSamples, SampleDataset, checked_index
from megatron.model.spec import Measure
from megatron.run.run import Run

Numbers = Mapping[str, npt.NDArray[np.float64]]
"""Result of :func:`megatron.features.evaluation.checkpoints.measure_samples`: arrays by name."""
Sample = TypeVar("Sample")


@dataclass(frozen=True)
class TrainingSamples:
    """Samples to train on, and the function that collates a batch."""

    dataset: SampleDataset[Any]
    collate: Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class HeldOutSamples:
    """Samples to evaluate on, one or more per example, with their lengths in tokens and the collate
    function for ``measure_samples``. ``predictions`` converts the measured values into one
    prediction per example. ``training`` contains the samples in training form, for the loss of
    ``--eval-interval``. It is None if labels are missing."""

    samples: SampleDataset[Any] | Sequence[Any]
    lengths: Sequence[int] | npt.NDArray[np.int64]
    collate: Callable[..., Any]
    measure: Measure
    predictions: Callable[[Numbers], list[Prediction]]
    training: SampleDataset[Any] | None


def require_labels(examples: Sequence[Any]) -> None:
    """Raise ConfigError if a training example has no label."""
    missing = next((each for each in examples if each.label is None), None)
    if missing is not None:
        raise ConfigError(
            f"--train-data: {missing.identity} has no label; a test file cannot be trained on"
        )


class FineTuning(ABC):
    """Task to fine-tune a model on. Examples are the untokenized records that :meth:`read`
    returns for a file. ``folders`` is true if the data consist of folders instead of files.
    ``predictions_suffix`` is the suffix of the predictions file if the user does not name the
    file."""

    name: str
    folders: bool = False
    predictions_suffix: str = ".jsonl"

    @abstractmethod
    def settings(self) -> Settings:
        """Return the model settings that the task requires, by field of ``ModelFlags``."""

    @abstractmethod
    def read(self, path: Path) -> list[Any]:
        """Return the examples of a file or folder, at least one. Raises ConfigError, with file and
        line, if the file or folder cannot be used."""

    @abstractmethod
    def training_samples(self, examples: Sequence[Any], run: Run) -> TrainingSamples:
        """Return the examples as training samples. Raises ConfigError, naming the example, if one
        has no label."""

    @abstractmethod
    def held_out_samples(self, examples: Sequence[Any], run: Run) -> HeldOutSamples:
        """Return the examples as evaluation samples, with the function that converts measurements
        into predictions."""

    @abstractmethod
    def scores(self, predictions: Sequence[Prediction]) -> Scores:
        """Return the scores of one or more predictions, all of which have labels."""

    def write_predictions(self, path: Path, sets: Mapping[str, Sequence[Prediction]]) -> None:
        """Write the predictions of validation sets, given by name, to one file or to several next
        to it."""
        write_predictions(path, sets)


@dataclass(frozen=True)
class LabelTask(FineTuning):
    """Task whose data are GLUE tables or RACE folders."""

    data: TableTask | RaceTask

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.data.name

    @property
    def folders(self) -> bool:  # type: ignore[override]
        return self.data.folders

    def read(self, path: Path) -> list[Any]:
        return [*self.data.read(path)]

    def scores(self, predictions: Sequence[Prediction]) -> Scores:
        return SCORERS[self.data.metric](predictions)


class ShuffledEpochs(RenumberedSamples[Sample]):
    """Dataset repeated for several epochs, each shuffled like torch's ``DistributedSampler`` with
    the sum of seed and epoch. Sample n belongs to epoch n // len(dataset). ``count`` is the total
    number of samples."""

    def __init__(self, dataset: SampleDataset[Sample], seed: int, count: int) -> None:
        super().__init__(dataset)
        self._seed, self._count = seed, count
        self._orders: dict[int, npt.NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return self._count

    def number(self, index: int) -> int:
        epoch, place = divmod(checked_index(index, self._count), len(self.dataset))
        if epoch not in self._orders:
            # A batch may span two epochs. The orders of earlier epochs are no longer needed.
            self._orders = {e: order for e, order in self._orders.items() if e == epoch - 1}
            generator = torch.Generator()
            generator.manual_seed(self._seed + epoch)
            order = torch.randperm(len(self.dataset), generator=generator)
            self._orders[epoch] = order.numpy()
        return int(self._orders[epoch][place])
