"""Tasks on which a model is fine-tuned: their settings, samples, predictions and scores, and the
order of the samples."""

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
"""Result of :func:`megatron.features.evaluation.checkpoints.measure_samples`."""
Sample = TypeVar("Sample")


@dataclass(frozen=True)
class TrainingSamples:
    """Samples to train on, and the collator of their batches."""

    dataset: SampleDataset[Any]
    collate: Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class HeldOutSamples:
    """Samples to evaluate on, one or several for each example, with their tokens and collator as in
    ``measure_samples``. ``predictions`` makes one of the measure's numbers for each example;
    ``training`` are the same samples as they are trained on, for the loss of ``--eval-interval``,
    None where labels are missing."""

    samples: SampleDataset[Any] | Sequence[Any]
    lengths: Sequence[int] | npt.NDArray[np.int64]
    collate: Callable[..., Any]
    measure: Measure
    predictions: Callable[[Numbers], list[Prediction]]
    training: SampleDataset[Any] | None


def require_labels(examples: Sequence[Any]) -> None:
    """Raises ConfigError if an example to train on has no label."""
    missing = next((each for each in examples if each.label is None), None)
    if missing is not None:
        raise ConfigError(
            f"--train-data: {missing.identity} has no label; a test file cannot be trained on"
        )


class FineTuning(ABC):
    """A task on which a model is fine-tuned. Examples are what :meth:`read` returns for a file,
    before there is a tokenizer. ``folders``: data are folders; ``predictions_suffix``: of the file
    of predictions, where it is not named."""

    name: str
    folders: bool = False
    predictions_suffix: str = ".jsonl"

    @abstractmethod
    def settings(self) -> Settings:
        """Settings of the model, by field of ``ModelFlags``."""

    @abstractmethod
    def read(self, path: Path) -> list[Any]:
        """The examples of a file or folder, at least one. Raises ConfigError, with file and line,
        if it cannot be used."""

    @abstractmethod
    def training_samples(self, examples: Sequence[Any], run: Run) -> TrainingSamples:
        """Examples as samples. Raises ConfigError, with file and line, if one has no label."""

    @abstractmethod
    def held_out_samples(self, examples: Sequence[Any], run: Run) -> HeldOutSamples:
        """Examples as samples, and predictions of them."""

    @abstractmethod
    def scores(self, predictions: Sequence[Prediction]) -> Scores:
        """Return the scores of one or more predictions with known labels."""

    def write_predictions(self, path: Path, sets: Mapping[str, Sequence[Prediction]]) -> None:
        """Writes the predictions of validation sets by name."""
        write_predictions(path, sets)


@dataclass(frozen=True)
class LabelTask(FineTuning):
    """A task whose files are tables, or RACE's."""

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
    """A data set again and again, each time in another order, from torch's ``DistributedSampler``
    with the sum of seed and epoch. Sample n is of epoch n // samples; ``count`` is the number of
    samples that are asked for, at most."""

    def __init__(self, dataset: SampleDataset[Sample], seed: int, count: int) -> None:
        super().__init__(dataset)
        self._seed, self._count = seed, count
        self._orders: dict[int, npt.NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return self._count

    def number(self, index: int) -> int:
        epoch, place = divmod(checked_index(index, self._count), len(self.dataset))
        if epoch not in self._orders:
            # A batch may have samples of two epochs; earlier orders are not needed any more.
            self._orders = {e: order for e, order in self._orders.items() if e == epoch - 1}
            generator = torch.Generator()
            generator.manual_seed(self._seed + epoch)
            order = torch.randperm(len(self.dataset), generator=generator)
            self._orders[epoch] = order.numpy()
        return int(self._orders[epoch][place])
