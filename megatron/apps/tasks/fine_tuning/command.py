"""Fine-tuning tasks of ``tasks/main.py``: they train with the pretraining trainer and evaluate
after each epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.apps.tasks.config import FINE_TUNING, TaskConfig, check_inputs, wanted_checkpoints
from megatron.apps.tasks.fine_tuning.encoder import Classification, MultipleChoice
from megatron.apps.tasks.fine_tuning.evaluation import (
    NOT_TRAINED,
    EpochEvaluation,
    EpochRecords,
    EvaluateEpochs,
    ValidationSets,
    tell,
)
from megatron.apps.tasks.fine_tuning.examples import RACE, TABLES
from megatron.apps.tasks.fine_tuning.scores import overall_line
from megatron.apps.tasks.fine_tuning.squad import Squad
from megatron.apps.tasks.fine_tuning.task import FineTuning, ShuffledEpochs, TrainingSamples
from megatron.apps.tasks.fine_tuning.text_to_text import TextRace, TextTable
from megatron.apps.tasks.report import EvaluatedModel, ModelResults, finish
from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.folder import tag
from megatron.checkpoint.manifest import MANIFEST
from megatron.checkpoint.source import FoundCheckpoint
from megatron.config import ConfigError, Setting, Settings
from megatron.config.output import check_output
from megatron.config.training import LENGTHS
from megatron.data.build import DataFile, Datasets, content_of_files
from megatron.data.loader import TrainingData
from megatron.data.samples import RepeatedSamples
from megatron.engine.environment import training_device
from megatron.engine.loading import load_checkpoint
from megatron.families import Family, family_names, family_of, spec_of
from megatron.features.evaluation.checkpoints import evaluation_settings
from megatron.features.evaluation.evaluator import build_evaluator
from megatron.parallel.meeting import run_meeting
from megatron.parallel.mesh import Mesh
from megatron.run.process import connected
from megatron.run.run import Run, run_of, show_configuration
from megatron.training.build import build_trainer
from megatron.training.plan import Epochs, TrainingPlan
from megatron.util.processes import is_main_process


def with_head(config: TaskConfig) -> FineTuning:
    """Return the task for a model with a task-specific output head."""
    assert config.task is not None
    if config.task == Squad.name:
        return Squad(config)
    if config.task == FINE_TUNING:
        from megatron.apps.tasks.retrieval.natural_questions import NaturalQuestions

        return NaturalQuestions(config)
    if config.task == RACE.name:
        return MultipleChoice(RACE, config.max_qa_length)
    return Classification(TABLES[config.task])


def as_text(config: TaskConfig, family: Family) -> FineTuning:
    """Return the task for a model that predicts the answer as text. Raises ConfigError if the
    family cannot predict text, or if the task requires a span of text (SQuAD)."""
    assert config.task is not None
    if family.context_reader is None or config.task == Squad.name:
        head = with_head(config).settings()["head"].value
        able = [name for name in family_names() if head in family_of(name).heads]
        raise ConfigError(
            f"--task {config.task}: models of the family {family.name} have no {head} head for it; "
            f"those of {', '.join(able)} have"
        )
    if config.task == RACE.name:
        return TextRace(RACE, family)
    return TextTable(TABLES[config.task], family)


def run_fine_tuning(config: TaskConfig, settings: Settings, processes: int) -> None:
    """Fine-tune a model and evaluate it after every epoch, or only evaluate it. See
    :data:`megatron.apps.tasks.command.TaskFunction`."""
    task = with_head(config)
    head = task.settings()["head"].value
    if "family" in task.settings():
        settings = _of_family(task, settings)
    elif "family" not in settings:
        name = next(name for name in family_names() if head in family_of(name).heads)
        settings = settings | {"family": Setting(name, f"task {task.name}")}
    family = family_of(settings["family"].value)
    if head not in family.heads:
        task = as_text(config, family)
    if config.epochs is None:
        raise ConfigError("--epochs is missing: how often to train on all samples, 0 to evaluate")
    train_examples, valid_examples = _read_examples(task, config)
    check_output("--output", config.output)
    check_output("--predictions", config.predictions)
    settings = _completed(task, config, settings)
    run = run_of(settings, processes)
    train = None
    if config.epochs:
        train = task.training_samples(train_examples, run)
        count = len(train.dataset)
        length = Setting(config.epochs * count, f"derived: epochs x {count} samples")
        run = run_of(settings | {"train_samples": length}, processes)
    show_configuration(run)
    held_out = {
        name: task.held_out_samples(examples, run) for name, examples in valid_examples.items()
    }
    size = config.eval_micro_batch_size or run.config.training.micro_batch_size
    sets = ValidationSets(task, held_out, size)
    with connected(run, config) as mesh:
        if train is None:
            _evaluate(config, run, mesh, sets)
        else:
            _train(config, run, mesh, sets, train)


def _of_family(task: FineTuning, settings: Settings) -> Settings:
    """Return the settings of a task that supports only one model family. Raises ConfigError if the
    checkpoint is of another family."""
    wanted = task.settings()["family"]
    own = settings.get("family", wanted)
    if own.value != wanted.value:
        raise ConfigError(
            f"--task {task.name}: {own.origin} is a model of the family {own.value}, and the task "
            f"trains a {wanted.value}: give --pretrained-checkpoint one, or --bert-load a BERT"
        )
    return settings | {"family": wanted}


def _read_examples(
    task: FineTuning, config: TaskConfig
) -> tuple[list[Any], Mapping[str, list[Any]]]:
    """Return the examples of ``--train-data``, and the examples of each validation set by name.
    Raises ConfigError if a flag or one of its files is missing or cannot be used."""
    kind = "folders" if task.folders else "files"
    if config.epochs and not config.train_data:
        raise ConfigError(
            f"--train-data is missing: the {kind} of {task.name} to fine-tune on; --epochs 0 "
            "evaluates only"
        )
    if not config.epochs and not config.valid_data:
        raise ConfigError(f"--valid-data is missing: the {kind} of {task.name} to evaluate on")
    train_data = config.train_data if config.epochs else ()
    check_inputs("--train-data", train_data, task.folders)
    check_inputs("--valid-data", config.valid_data, task.folders)
    train = [example for path in train_data for example in task.read(Path(path))]
    names = set_names(config.valid_data, task.name, task.folders)
    pairs = zip(names, config.valid_data, strict=True)
    return train, {name: task.read(Path(path)) for name, path in pairs}


def set_names(paths: Sequence[str], task: str, folders: bool) -> list[str]:
    """Return the names of validation sets. A name is the part of the path after the task's name,
    without ``.tsv`` or ``.json`` and with dashes, such as ``dev-matched``. If the path does not
    contain the task's name, the name is the file name, or with ``folders`` the last two components
    of the path. Duplicates are numbered."""
    names: list[str] = []
    for path in paths:
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        after = path.rpartition(task)[2] if task in path else ""
        if not after.strip("/_-."):
            after = "-".join(parts[-2:] if folders else parts[-1:])
        after = after.removesuffix(".tsv").removesuffix(".json").strip("/")
        name = first = after.replace("/", "-").replace("_", "-").strip("-.")
        number = 2
        while name in names:
            name, number = f"{first}-{number}", number + 1
        names.append(name)
    return names


def _completed(task: FineTuning, config: TaskConfig, settings: Settings) -> Settings:
    """Return the settings of the task's run. The training length is a placeholder of one sample per
    epoch until the number of samples is known."""
    settings = settings | task.settings()
    if config.keep_last:
        settings["keep_last"] = Setting(config.keep_last, "flag --keep-last")
    elif config.keep_last is not None:
        tell("--keep-last without a number changes nothing: the last batch is always kept")
    if not config.epochs:
        settings.pop("keep_last", None)
        used, unused = evaluation_settings(settings, config.eval_micro_batch_size)
        if unused:
            tell(f"--epochs 0 evaluates and does not use {', '.join(sorted(unused))}")
        return used
    for unit in LENGTHS:
        name = f"train_{unit}"
        if name in settings:
            raise ConfigError(
                f"--{name.replace('_', '-')} {settings[name].value}: a fine-tuning is --epochs "
                f"{config.epochs} long; leave it out, or stop earlier with --exit-interval"
            )
    settings["train_samples"] = Setting(config.epochs, "derived: epochs")
    # Every epoch ends with a full evaluation of the validation sets. Their loss during an epoch is
    # computed only if the user sets --eval-iters.
    settings.setdefault("eval_iters", Setting(0, f"task {task.name}"))
    return settings


def _train(
    config: TaskConfig, run: Run, mesh: Mesh, sets: ValidationSets, train: TrainingSamples
) -> None:
    assert config.epochs
    epochs = Epochs(config.epochs, len(train.dataset))
    save = run.config.checkpoint.save
    record = EpochRecords(Path(save) if save else None, is_main_process())
    predictions = Path(config.predictions) if config.predictions else None
    evaluations = EvaluateEpochs(sets, record, predictions)
    data = _training_data(config, run, sets, train, TrainingPlan(run.config, epochs))
    build_trainer(run, mesh, (evaluations,), data, epochs).fit()
    results = evaluations.evaluations
    if is_main_process():
        folders = [Path(save) / tag(each.iteration) if save else None for each in results]
        _finish(config, run, results, folders)
        if record.best is not None:
            best = record.best
            where = f", in {Path(save) / tag(best.iteration)}" if save else ""
            tell(f"best epoch {best.epoch}: {best.metric} {best.value:.6g}{where}")


def _training_data(
    config: TaskConfig, run: Run, sets: ValidationSets, train: TrainingSamples, plan: TrainingPlan
) -> TrainingData:
    def files() -> list[DataFile]:
        named = {"train": config.train_data, "valid": config.valid_data}
        return [
            DataFile(part, path, None, (0, 1), content_of_files(path))
            for part, paths in named.items()
            for path in paths
        ]

    count, valid, _ = plan.sample_counts
    held_out = {
        name: RepeatedSamples(samples.training, valid)
        for name, samples in sets.sets.items()
        if samples.training is not None
    }
    shuffled = ShuffledEpochs(train.dataset, run.config.training.seed, count)
    return TrainingData(Datasets(shuffled, held_out, {}), train.collate, files=files)


def _evaluate(config: TaskConfig, run: Run, mesh: Mesh, sets: ValidationSets) -> None:
    listed = wanted_checkpoints(run.config.checkpoint, config.all_iterations)
    checkpoints = [each for each in listed if each is not None]
    if not checkpoints:
        raise ConfigError("--epochs 0 evaluates a fine-tuned model: name it with --load")
    run_meeting().compare_checkpoints(checkpoints)
    for each in checkpoints:
        _check_head(each, run, sets.task)
    spec = spec_of(run.config.model, run.config.parallel)
    engine = build_evaluator(run.config, spec, mesh, training_device())
    evaluations = []
    for each in checkpoints:
        source = load_checkpoint(engine, each, weights_only=True)
        iteration = source.state.get("iteration", 0)
        tell(f"evaluating {each.folder}")
        evaluation = sets.evaluate(
            engine, NOT_TRAINED, iteration, lambda measured: tell(measured.line())
        )
        evaluations.append(evaluation)
        if evaluation.overall is not None:
            tell(overall_line(NOT_TRAINED, evaluation.overall))
    if is_main_process():
        folder = checkpoints[-1].folder
        if (folder / MANIFEST).is_file():  # The checkpoint belongs to a run: write next to it.
            folder = folder.parent
        name = f"predictions_{'_'.join(sets.sets)}{sets.task.predictions_suffix}"
        path = Path(config.predictions or folder / name)
        sets.task.write_predictions(path, evaluations[-1].predictions)
        tell(f"predictions: {path}")
        _finish(config, run, evaluations, [each.folder for each in checkpoints])


def _check_head(found: FoundCheckpoint, run: Run, task: FineTuning) -> None:
    model, expected = found.open(verify=False).model, run.config.model
    if (model.head, model.num_labels) != (expected.head, expected.num_labels):
        labels = f" of {model.num_labels} labels" if model.num_labels else ""
        raise CheckpointError(
            f"{found.folder} has the head {model.head}{labels}, which is not that of {task.name}: "
            "fine-tune the model with --pretrained-checkpoint, --train-data and --epochs"
        )


def _finish(
    config: TaskConfig,
    run: Run,
    evaluations: Sequence[EpochEvaluation],
    folders: Sequence[Path | None],
) -> None:
    """Write the results as a table, as a JSON file if requested and, for several checkpoints, as
    a plot of the scores. The plot is next to the JSON file, or else in the folder of the
    checkpoints."""
    if not evaluations:
        return
    lines = [
        ModelResults(
            EvaluatedModel.of(run.config, folder, each.iteration),
            [one.result for one in each.sets],
        )
        for each, folder in zip(evaluations, folders, strict=True)
    ]
    options = run.config.checkpoint
    folder = options.save or options.load
    plot = Path(folder, f"{config.task}.png") if folder else None
    if config.output:
        plot = Path(config.output).with_suffix(".png")
    finish(lines, config.output, plot)
