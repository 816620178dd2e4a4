"""A fine-tuning: training by the trainer of pretraining, and evaluations of its epochs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.folder import tag
from megatron.checkpoint.manifest import MANIFEST
from megatron.config import ConfigError, Setting, Settings
from megatron.config.training import LENGTHS
from megatron.data.build import Datasets
from megatron.data.loader import TrainingData
from megatron.engine.environment import distributed, training_device
from megatron.engine.evaluator import build_evaluator
from megatron.engine.loading import load_checkpoint
from megatron.families import spec_of
from megatron.parallel.mesh import Mesh
from megatron.tasks.config import TaskConfig
from megatron.tasks.fine_tuning.best_epoch import Epochs
from megatron.tasks.fine_tuning.evaluation import (
    NOT_TRAINED,
    EpochEvaluation,
    EvaluateEpochs,
    ValidationSets,
)
from megatron.tasks.fine_tuning.order import Repeated, ShuffledEpochs, set_names
from megatron.tasks.fine_tuning.scores import overall_line
from megatron.tasks.fine_tuning.task import FineTuning, Prepared, TrainingSamples
from megatron.tasks.report import EvaluatedModel, Evaluation, finish
from megatron.training import plan as plans
from megatron.training.plan import TrainingPlan
from megatron.training.report import say
from megatron.training.resume import ResumeSource, find_origin
from megatron.training.run import Run, build_trainer, run_of, show_configuration
from megatron.util.processes import is_main_process

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Examples:
    """What the files of ``--train-data`` and ``--valid-data`` have; validation sets by name."""

    train: Sequence[Any]
    valid: Mapping[str, Sequence[Any]]


def fine_tune(
    task: FineTuning, config: TaskConfig, settings: Settings, processes: int
) -> list[EpochEvaluation]:
    """Fine-tunes and evaluates after every epoch, or evaluates only; returns the evaluations of
    this process. Raises what :meth:`megatron.tasks.task.Task.run` raises."""
    if config.epochs is None:
        raise ConfigError("--epochs is missing: how often to train on all samples, 0 to evaluate")
    examples = read_examples(task, config)
    settings = _completed(task, config, settings)
    run = run_of(settings, processes)
    train = None
    if config.epochs:
        train = task.training_samples(examples.train, Prepared(run.config, run.tokenizer, config))
        count = len(train.dataset)
        length = Setting(config.epochs * count, f"derived: epochs x {count} samples")
        run = run_of(settings | {"train_samples": length}, processes)
    show_configuration(run)
    prepared = Prepared(run.config, run.tokenizer, config)
    held_out = {
        name: task.held_out_samples(found, prepared) for name, found in examples.valid.items()
    }
    size = config.eval_micro_batch_size or run.config.training.micro_batch_size
    sets = ValidationSets(task, held_out, size)
    with distributed(run.config.parallel) as mesh:
        if train is None:
            return [_evaluate(config, run, mesh, sets)]
        return _train(config, run, mesh, sets, train)


def read_examples(task: FineTuning, config: TaskConfig) -> Examples:
    """Reads all files. Raises ConfigError if there are none, or one cannot be used."""
    kind = "folders" if task.folders else "files"
    if config.epochs and not config.train_data:
        raise ConfigError(
            f"--train-data is missing: the {kind} of {task.name} to fine-tune on; --epochs 0 "
            "evaluates only"
        )
    if not config.epochs and not config.valid_data:
        raise ConfigError(f"--valid-data is missing: the {kind} of {task.name} to evaluate on")
    train = [
        example
        for path in (config.train_data if config.epochs else ())
        for example in task.read(Path(path))
    ]
    names = set_names(config.valid_data, task.name, task.folders)
    valid = {
        name: task.read(Path(path)) for name, path in zip(names, config.valid_data, strict=True)
    }
    return Examples(train, valid)


def _completed(task: FineTuning, config: TaskConfig, settings: Settings) -> Settings:
    """The settings of the run of a task, with a length of one sample for each epoch."""
    origin = f"task {task.name}"
    settings = settings | task.settings()
    if config.keep_last is not None:
        if config.keep_last:
            settings["keep_last"] = Setting(config.keep_last, "flag --keep-last")
        else:
            logger.info("--keep-last changes nothing: no batch is left out, also not the last one")
    if not config.epochs:
        settings["skip_train"] = Setting(True, "--epochs 0")
        settings.pop("keep_last", None)
        micro = Setting(config.eval_micro_batch_size or 1, origin)
        settings.setdefault("micro_batch_size", micro)
        return settings
    for unit in LENGTHS:
        name = f"train_{unit}"
        if name in settings:
            raise ConfigError(
                f"--{name.replace('_', '-')} {settings[name].value}: a fine-tuning is --epochs "
                f"{config.epochs} long; leave it out, or stop earlier with --exit-interval"
            )
    settings["train_samples"] = Setting(config.epochs, "derived: epochs")
    # Every epoch ends with all of the validation sets; their loss on the way is on request.
    settings.setdefault("eval_iters", Setting(0, origin))
    return settings


def _train(
    config: TaskConfig, run: Run, mesh: Mesh, sets: ValidationSets, train: TrainingSamples
) -> list[EpochEvaluation]:
    assert config.epochs
    epochs = plans.Epochs(config.epochs, len(train.dataset))
    save = run.config.checkpoint.save
    record = Epochs(Path(save) if save else None, is_main_process())
    predictions = Path(config.predictions) if config.predictions else None
    evaluations = EvaluateEpochs(sets, record, predictions)
    data = _training_data(run, sets, train, TrainingPlan(run.config, epochs))
    build_trainer(run, mesh, (evaluations,), data, epochs).fit()
    if is_main_process():
        if record.best is not None:
            best = record.best
            where = f", in {Path(save) / tag(best.iteration)}" if save else ""
            say(f"best epoch {best.epoch}: {best.metric} {best.value:.6g}{where}")
        _finish(config, run, evaluations.evaluations, None)
    return evaluations.evaluations


def _training_data(
    run: Run, sets: ValidationSets, train: TrainingSamples, plan: TrainingPlan
) -> TrainingData:
    count, valid, _ = plan.sample_counts
    seed = run.config.training.seed
    held_out = {
        name: Repeated(samples.training, valid)
        for name, samples in sets.sets.items()
        if samples.training is not None
    }
    datasets = Datasets(ShuffledEpochs(train.dataset, seed, count), held_out, {})
    return TrainingData(datasets, train.collate)


def _evaluate(config: TaskConfig, run: Run, mesh: Mesh, sets: ValidationSets) -> EpochEvaluation:
    origin = find_origin(run.config.checkpoint)
    if origin is None:
        raise ConfigError("--epochs 0 evaluates a fine-tuned model: name it with --load")
    _check_head(origin, run, sets.task)
    spec = spec_of(run.config.model, run.config.parallel)
    engine = build_evaluator(run.config, spec, mesh, training_device())
    source = load_checkpoint(engine, origin.found, weights_only=True)
    iteration = source.state.get("iteration", 0) if source.state else 0

    def report(line: str) -> None:
        if is_main_process():
            print(line, flush=True)

    found = sets.evaluate(engine, NOT_TRAINED, iteration, lambda each: report(each.line()))
    if found.overall is not None:
        report(overall_line(NOT_TRAINED, found.overall))
    if is_main_process():
        path = _predictions_path(config, origin, sets)
        sets.task.write_predictions(path, found.predictions)
        say(f"predictions: {path}")
        _finish(config, run, [found], origin.found.folder)
    return found


def _check_head(origin: ResumeSource, run: Run, task: FineTuning) -> None:
    model = origin.found.open(verify=False).model
    wanted = run.config.model
    if (model.head, model.num_labels) != (wanted.head, wanted.num_labels):
        labels = f" of {model.num_labels} labels" if model.num_labels else ""
        raise CheckpointError(
            f"{origin.flag}: {origin.found.folder} has the head {model.head}{labels}, not that of "
            f"{task.name}: fine-tune it with --pretrained-checkpoint, --train-data and --epochs"
        )


def _predictions_path(config: TaskConfig, origin: ResumeSource, sets: ValidationSets) -> Path:
    if config.predictions:
        return Path(config.predictions)
    folder = origin.found.folder
    load = folder.parent if (folder / MANIFEST).is_file() else folder
    return load / f"predictions_{'_'.join(sets.sets)}{sets.task.predictions_suffix}"


def _finish(
    config: TaskConfig, run: Run, evaluations: Sequence[EpochEvaluation], folder: Path | None
) -> None:
    """The table, the JSON file and, of several epochs, the curves."""
    if not evaluations:
        return
    found = [
        Evaluation(
            EvaluatedModel.of(run.config, folder, each.iteration),
            [one.result for one in each.sets],
        )
        for each in evaluations
    ]
    beside = run.config.checkpoint.save or (config.output and Path(config.output).parent) or "."
    finish(found, config.output, Path(beside, f"{config.task}.png"))
