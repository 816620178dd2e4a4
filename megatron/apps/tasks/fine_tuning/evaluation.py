"""Evaluation on several validation sets, once or after every epoch, and the record of all epochs.

The record is the file ``best_epoch.json`` next to the checkpoints. The best epoch's checkpoint is
kept regardless of ``--keep-last``: :func:`megatron.features.older_checkpoints.retention.superseded`
reads the file.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron.apps.tasks.fine_tuning.scores import (
    Prediction,
    Scores,
    mean_loss,
    overall_line,
    set_line,
)
from megatron.apps.tasks.fine_tuning.task import FineTuning, HeldOutSamples
from megatron.apps.tasks.report import TaskResult, write_json
from megatron.checkpoint.folder import BEST, tag
from megatron.config import ConfigError
from megatron.engine.train_engine import ModelEngine
from megatron.features.evaluation.checkpoints import measure_samples
from megatron.training.report import say
from megatron.training.trainer import Callback, Trainer
from megatron.util.json_text import parse_json
from megatron.util.processes import is_main_process
from megatron.util.progress import move_to, progress_bar

NOT_TRAINED = -1
"""Epoch number of an evaluation without training."""


@dataclass(frozen=True)
class SetEvaluation:
    """Result on one validation set after ``iteration`` steps. ``scores`` is None if any example has
    no label."""

    iteration: int
    epoch: int
    predictions: Sequence[Prediction]
    scores: Scores | None
    result: TaskResult

    @property
    def kind(self) -> str:
        """Name under which the log writers record these values."""
        return f"task {self.result.name}"

    def line(self) -> str:
        """Return the console line."""
        name, seconds = self.result.name, self.result.seconds
        if self.scores is None:
            return (
                f" > |epoch: {self.epoch}| {len(self.predictions)} predictions for {name}, "
                f"whose labels are not known, elapsed time (sec): {seconds:.3f}"
            )
        return set_line(self.epoch, name, self.scores, seconds)

    def row(self) -> dict[str, float | None]:
        """Return the values by name, for the log writers."""
        names = ("examples", "seconds", "tokens_per_second")
        return {**self.result.metrics, **{name: getattr(self.result, name) for name in names}}


@dataclass(frozen=True)
class EpochEvaluation:
    """Results on all validation sets after an epoch. ``overall`` scores the predictions of all
    labelled sets together. It is None if no set is labelled."""

    epoch: int
    iteration: int
    sets: Sequence[SetEvaluation]
    overall: Scores | None

    @property
    def predictions(self) -> dict[str, Sequence[Prediction]]:
        """Predictions by the name of the validation set."""
        return {each.result.name: each.predictions for each in self.sets}


@dataclass(frozen=True)
class ValidationSets:
    """Validation sets of a task by name, with the batch size for evaluating them."""

    task: FineTuning
    sets: Mapping[str, HeldOutSamples]
    micro_batch_size: int

    def evaluate(
        self,
        engine: ModelEngine,
        epoch: int,
        iteration: int,
        report: Callable[[SetEvaluation], object],
    ) -> EpochEvaluation:
        """Predict and score every validation set, calling ``report`` after each one. Collective:
        every rank must call it, and all get the same results."""
        evaluations = []
        for name, held_out in self.sets.items():
            began = time.perf_counter()
            predictions = self._predictions(engine, name, held_out)
            seconds = time.perf_counter() - began
            labelled = all(each.label is not None for each in predictions)
            scores = self.task.scores(predictions) if labelled else None
            metrics, loss = {} if scores is None else {**scores.values}, mean_loss(predictions)
            metrics |= {} if loss is None else {"loss": loss}
            count, tokens = len(predictions), int(np.sum(held_out.lengths))
            details = {"epoch": epoch}
            result = TaskResult(name, metrics, count, tokens, seconds, details=details)
            evaluations.append(SetEvaluation(iteration, epoch, predictions, scores, result))
            report(evaluations[-1])
        known = [p for each in evaluations if each.scores for p in each.predictions]
        return EpochEvaluation(
            epoch, iteration, evaluations, self.task.scores(known) if known else None
        )

    def _predictions(
        self, engine: ModelEngine, name: str, held_out: HeldOutSamples
    ) -> list[Prediction]:
        with progress_bar(name, total=len(held_out.samples), unit=" samples") as bar:
            numbers = measure_samples(
                engine,
                held_out.samples,
                held_out.collate,
                held_out.measure,
                self.micro_batch_size,
                held_out.lengths,
                partial(move_to, bar),
            )
        return held_out.predictions(numbers)


@dataclass(frozen=True)
class EpochRecord:
    """Scores of an epoch, counted from 0, after ``iteration`` steps. ``metric`` and ``value``
    are the score over all validation sets that epochs are compared by, ``sets`` the scores of
    each set."""

    epoch: int
    iteration: int
    metric: str
    value: float
    sets: Mapping[str, Mapping[str, float]]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> EpochRecord:
        """Return a record from its JSON content, in which null represents NaN."""
        sets = {
            name: {metric: _number(value) for metric, value in metrics.items()}
            for name, metrics in content["sets"].items()
        }
        return cls(**{**content, "value": _number(content["value"]), "sets": sets})


class EpochRecords:
    """Records of all epochs so far. ``save`` is the folder of the checkpoints, or None if nothing
    is saved. ``writes`` is true on the process that writes the file. Raises ConfigError if the file
    of an earlier run cannot be read."""

    def __init__(self, save: Path | None, writes: bool) -> None:
        self._path = None if save is None else save / BEST
        self._writes = writes
        self.records: list[EpochRecord] = []
        if self._path is not None and self._path.is_file():
            try:
                epochs = parse_json(self._path.read_bytes(), str(self._path), lenient=True)[
                    "epochs"
                ]
                self.records = [EpochRecord.of(content) for content in epochs]
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ConfigError(
                    f"{self._path} cannot be read; delete it, and the best epoch is found among "
                    "those that follow"
                ) from None

    @property
    def best(self) -> EpochRecord | None:
        """First epoch with the highest value, or None without records. NaN ranks lowest."""
        return max(
            self.records,
            key=lambda record: -math.inf if math.isnan(record.value) else record.value,
            default=None,
        )

    def has(self, epoch: int) -> bool:
        return any(record.epoch == epoch for record in self.records)

    def forget_after(self, iteration: int) -> None:
        """Drop the records of epochs after an iteration, because the run trains those epochs
        again."""
        self.records = [record for record in self.records if record.iteration <= iteration]

    def add(self, record: EpochRecord) -> None:
        """Add an epoch's record, replacing any earlier record of that epoch, and write the file."""
        self.records = [each for each in self.records if each.epoch != record.epoch]
        self.records.append(record)
        best = self.best
        assert best is not None
        if self._path is None or not self._writes:
            return
        content = {
            "epoch": best.epoch,
            "iteration": best.iteration,
            "checkpoint": tag(best.iteration),
            "metric": best.metric,
            "value": best.value,
            "epochs": [asdict(record) for record in self.records],
        }
        write_json(self._path, content)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


class EvaluateEpochs(Callback):
    """Callback that evaluates after every epoch, adds to the record, and writes the best epoch's
    predictions to ``predictions``. If a run was killed before evaluating an epoch, the evaluation
    is done when that epoch's checkpoint is loaded."""

    def __init__(
        self, sets: ValidationSets, epochs: EpochRecords, predictions: Path | None
    ) -> None:
        self.sets, self.epochs, self._predictions = sets, epochs, predictions
        self.evaluations: list[EpochEvaluation] = []
        self._begun = False

    def before_step(self, trainer: Trainer) -> None:
        self._begin(trainer)

    def epoch_ended(self, trainer: Trainer, epoch: int) -> None:
        trainer.settle()
        self._evaluate(trainer, epoch)

    def training_ended(self, trainer: Trainer, reason: str | None) -> None:
        self._begin(trainer)  # In case no step was left to train.

    def _begin(self, trainer: Trainer) -> None:
        if self._begun:
            return
        self._begun = True
        self.epochs.forget_after(trainer.iteration)
        ended = trainer.plan.epochs_ended(trainer.iteration) if trainer.iteration else ()
        for epoch in ended:
            if not self.epochs.has(epoch - 1):
                self._evaluate(trainer, epoch)

    def _evaluate(self, trainer: Trainer, epoch: int) -> None:
        """Evaluate after an epoch. ``epoch`` counts from 1 as in the trainer, the results from
        0."""
        result = self.sets.evaluate(trainer.engine, epoch - 1, trainer.iteration, trainer.report)
        self.evaluations.append(result)
        if result.overall is None:
            return
        tell(overall_line(result.epoch, result.overall))
        metrics = {each.result.name: each.result.metrics for each in result.sets}
        name, value = result.overall.compared
        self.epochs.add(EpochRecord(result.epoch, result.iteration, name, value, metrics))
        is_best = self.epochs.best is not None and self.epochs.best.epoch == result.epoch
        if is_best and self._predictions is not None and is_main_process():
            self.sets.task.write_predictions(self._predictions, result.predictions)


def tell(line: str) -> None:
    """Print a line with the time, on the main process only."""
    if is_main_process():
        say(line.strip())
