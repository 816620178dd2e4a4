"""Evaluates several validation sets, once or after every epoch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.apps.tasks.fine_tuning.best_epoch import EpochRecord, EpochRecords
from megatron.apps.tasks.fine_tuning.metrics import (
    Scores,
    overall_line,
    set_line,
)
from megatron.apps.tasks.fine_tuning.predictions import Prediction, mean_loss
from megatron.apps.tasks.fine_tuning.task import FineTuning, HeldOutSamples
from megatron.apps.tasks.report import TaskResult
from megatron.engine.train_engine import ModelEngine
from megatron.training.measuring import measure_samples
from megatron.training.report import say
from megatron.training.trainer import Callback, Trainer
from megatron.util.processes import is_main_process
from megatron.util.progress import progress_bar

NOT_TRAINED = -1
"""The number of the epoch where nothing is trained."""


@dataclass(frozen=True)
class SetEvaluation:
    """What was measured on one validation set after ``iteration`` steps; ``scores`` are None where
    labels are missing."""

    name: str
    iteration: int
    epoch: int
    predictions: Sequence[Prediction]
    scores: Scores | None
    tokens: int
    seconds: float

    @property
    def kind(self) -> str:
        """The writers' name for these values."""
        return f"task {self.name}"

    def line(self) -> str:
        """The console line."""
        if self.scores is None:
            return (
                f" > |epoch: {self.epoch}| {len(self.predictions)} predictions for {self.name}, "
                f"whose labels are not known, elapsed time (sec): {self.seconds:.3f}"
            )
        return set_line(self.epoch, self.name, self.scores, self.seconds)

    def row(self) -> dict[str, float | None]:
        """The values by name, for writers."""
        return {
            **self.metrics,
            "examples": len(self.predictions),
            "seconds": self.seconds,
            "tokens_per_second": self.tokens / max(self.seconds, 1e-9),
        }

    @property
    def metrics(self) -> dict[str, float]:
        """The scores and, where every example has one, the mean loss."""
        found = dict(self.scores.values) if self.scores else {}
        loss = mean_loss(self.predictions)
        return found if loss is None else found | {"loss": loss}

    @property
    def result(self) -> TaskResult:
        """For the final table and the JSON file."""
        return TaskResult(
            self.name,
            self.metrics,
            len(self.predictions),
            self.tokens,
            self.seconds,
            details={"epoch": self.epoch},
        )


@dataclass(frozen=True)
class EpochEvaluation:
    """All validation sets after an epoch, and the scores of all labelled predictions together."""

    epoch: int
    iteration: int
    sets: Sequence[SetEvaluation]
    overall: Scores | None

    @property
    def predictions(self) -> dict[str, Sequence[Prediction]]:
        """Predictions by the name of the set."""
        return {each.name: each.predictions for each in self.sets}


@dataclass(frozen=True)
class ValidationSets:
    """The validation sets of a task, by name, and how they are evaluated."""

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
        """Predictions and scores of every set, each reported when it is done; every rank calls it
        and has the same results."""
        found = []
        for name, held_out in self.sets.items():
            found.append(self._evaluate(engine, name, held_out, epoch, iteration))
            report(found[-1])
        labelled = [p for each in found if each.scores for p in each.predictions]
        overall = self.task.scores(labelled) if labelled else None
        return EpochEvaluation(epoch, iteration, found, overall)

    def _evaluate(
        self, engine: ModelEngine, name: str, held_out: HeldOutSamples, epoch: int, iteration: int
    ) -> SetEvaluation:
        began = time.perf_counter()
        with progress_bar(name, total=len(held_out.samples), unit=" samples") as bar:
            numbers = measure_samples(
                engine,
                held_out.samples,
                held_out.collate,
                held_out.measure,
                self.micro_batch_size,
                held_out.lengths,
                lambda done: bar.update(done - bar.n),
            )
        predictions = held_out.predictions(numbers)
        seconds = time.perf_counter() - began
        labelled = all(each.label is not None for each in predictions)
        scores = self.task.scores(predictions) if labelled else None
        tokens = held_out.tokens
        return SetEvaluation(name, iteration, epoch, predictions, scores, tokens, seconds)


class EvaluateEpochs(Callback):
    """Evaluates after every epoch, keeps the record of the epochs, and writes the predictions of
    the best one to ``predictions``. An epoch whose evaluation a killed run has missed is evaluated
    when its checkpoint is loaded."""

    def __init__(
        self, sets: ValidationSets, epochs: EpochRecords, predictions: Path | None
    ) -> None:
        self.sets, self.epochs, self._predictions = sets, epochs, predictions
        self.evaluations: list[EpochEvaluation] = []
        self._begun = False

    def before_step(self, trainer: Trainer) -> None:
        if not self._begun:
            self._begin(trainer)

    def epoch_ended(self, trainer: Trainer, epoch: int) -> None:
        trainer.settle()
        self._evaluate(trainer, epoch)

    def training_ended(self, trainer: Trainer, reason: str | None) -> None:
        if not self._begun:  # nothing was left to train
            self._begin(trainer)

    def _begin(self, trainer: Trainer) -> None:
        self._begun = True
        self.epochs.forget_after(trainer.iteration)
        ended = trainer.plan.epochs_ended(trainer.iteration) if trainer.iteration else ()
        for epoch in ended:
            if not self.epochs.has(epoch - 1):
                self._evaluate(trainer, epoch)

    def _evaluate(self, trainer: Trainer, epoch: int) -> None:
        """Epochs of the trainer count from 1, those of the lines from 0."""
        found = self.sets.evaluate(trainer.engine, epoch - 1, trainer.iteration, trainer.report)
        self.evaluations.append(found)
        if found.overall is None:
            return
        tell(overall_line(found.epoch, found.overall))
        metrics = {each.name: each.metrics for each in found.sets}
        name, value = found.overall.compared
        self.epochs.add(EpochRecord(found.epoch, found.iteration, name, value, metrics))
        is_best = self.epochs.best is not None and self.epochs.best.epoch == found.epoch
        if is_best and self._predictions is not None and is_main_process():
            self.sets.task.write_predictions(self._predictions, found.predictions)


def tell(line: str) -> None:
    """Prints a line with the time, on the main process."""
    if is_main_process():
        say(line.strip())
