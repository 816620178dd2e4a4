"""Implementation of ``finetune.py``. It completes the flags, trains on examples, evaluates on
held-out examples, and writes the result."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.apps.finetune.answers import Baseline, SampleTexts, sample_prompts
from megatron.apps.finetune.export import REPORT, check_output_folder, export_model, is_exported
from megatron.apps.finetune.provenance import (
    TUNING,
    Earlier,
    TuningRecord,
    base_name,
    changes_since,
    check_base,
    earlier_run,
)
from megatron.apps.finetune.report import report
from megatron.apps.finetune.settings import (
    CHECKPOINTS,
    TuningConfig,
    check_flags,
    completed,
    derived,
    has_length,
    is_weighted,
    training_paths,
)
from megatron.apps.finetune.summary import TuningSummary
from megatron.apps.pictures.plots import read_metrics
from megatron.config import Setting, Settings
from megatron.config.command_line import versions
from megatron.data.build import Datasets
from megatron.data.loader import TrainingData
from megatron.data.samples import RenumberedSamples, SampleDataset, checked_index
from megatron.families import family_of
from megatron.features.instruction.examples import logger as log_of_packing
from megatron.features.keep_best.callback import stopped_early
from megatron.features.keep_best.flags import PatienceFlags
from megatron.features.preference.samples import logger as log_of_pairs
from megatron.run.process import connected
from megatron.run.run import Run, RunToolParser, run_of, show_configuration, start_processes
from megatron.training.build import build_trainer
from megatron.training.plan import Epochs, TrainingPlan
from megatron.util.files import write_whole
from megatron.util.processes import is_main_process
from megatron.util.progress import say


class ExampleCounts(NamedTuple):
    """Number of samples per epoch for each path of training data and for each held-out dataset."""

    train: tuple[int, ...]
    valid: dict[str, int]


class TuningRun(NamedTuple):
    """A fine-tuning run whose settings are complete."""

    config: TuningConfig
    run: Run
    epochs: Epochs | None
    counts: ExampleCounts


def parse(description: str | None = None, argv: Sequence[str] | None = None) -> TuningRun:
    """Prepare fine-tuning from a command line, and start all processes if the flags request it.
    Raises ValueError or OSError, naming the flag, model or data that cannot be used."""
    config, settings = RunToolParser(TuningConfig, description).parse(argv)
    check_flags(config, settings)
    check_output_folder(config)
    if "allow_changed_data" not in settings:
        check_base(config)
    return planned(config, settings, start_processes(settings, argv))


def planned(config: TuningConfig, settings: Settings, processes: int) -> TuningRun:
    """Complete the settings of a fine-tuning run, whose length depends on its examples."""
    settings = derived({"family": "gpt"}) | settings
    settings = completed(config, settings, processes)
    length = {} if has_length(settings) else derived({"train_samples": 10**6})
    run = run_of(settings | length, processes)
    counts = count_samples(run)
    settings = dict(settings)
    if len(config.data) > 1 and not is_weighted(config.data):
        # Weight paths without weights by their samples, so that each example is used equally often.
        pairs = zip(counts.train, training_paths(config), strict=True)
        words = tuple(word for count, path in pairs for word in (str(count), path))
        name = "train_data_path" if config.eval_data else "data_path"
        settings |= derived({name: words})
    epochs = None
    if not has_length(settings):
        count = config.epochs or (1 if {"preference", "rl"} & settings.keys() else 3)
        epochs = Epochs(count, sum(counts.train))
        how = f"derived: {count} epochs of {epochs.samples} samples"
        settings["train_samples"] = Setting(count * epochs.samples, how)
    settings = _evaluations(settings, run, counts)
    run = run_of(settings, processes)
    show_configuration(run)
    return TuningRun(config, run, epochs, counts)


def _evaluations(settings: Settings, run: Run, counts: ExampleCounts) -> Settings:
    """Add settings for ten evaluations on all held-out samples, and for frequent log lines."""
    batch = run.config.training.global_batch_size
    values = {
        "eval_iters": math.ceil(max(counts.valid.values(), default=0) / batch),
        "log_interval": 10,
    }
    steps = None
    if "train_samples" in settings:
        steps = settings["train_samples"].value // batch
    elif "train_iters" in settings:
        steps = settings["train_iters"].value
    if steps is not None:  # 10 evaluations, at least 50 log lines
        values["eval_interval"] = max(1, steps // 10)
        values["log_interval"] = min(10, max(1, steps // 50))
    return derived(values) | settings


def fine_tune(tuning: TuningRun) -> None:
    """Train to the end and export the model. A run that was stopped exports nothing. Raises
    ValueError or OSError if data or checkpoints cannot be used or the result cannot be written."""
    run, config = tuning.run, tuning.config
    assert config.output is not None
    with connected(run, config) as mesh:
        data = training_data(run, tuning.epochs, tuning.counts.valid)
        earlier = earlier_run(run.config)
        changes = [] if earlier is None else changes_since(earlier, run.config, data, config.output)
        if earlier is not None and _nothing_left(tuning, earlier):
            return
        record = record_of(tuning, earlier, changes)
        prompts = sample_prompts(config, run, data)
        callbacks = (Baseline(), SampleTexts(run, mesh, prompts))
        notes = {TUNING: record.to_json()}
        trainer = build_trainer(run, mesh, callbacks, data, tuning.epochs, notes, brief=True)
        stopped = trainer.fit()
    if not is_main_process():
        return
    output = Path(config.output)
    metrics = run.config.logging.metrics_file
    rows = read_metrics(metrics) if metrics and Path(metrics).is_file() else []
    summary = TuningSummary(run.config, record, trainer.iteration, rows)
    write_whole(output / REPORT, report(summary, output.resolve().name).encode())
    # Early stopping by --early-stopping-patience is a normal end, not an interruption.
    if stopped is not None and not stopped.startswith("--early-stopping-patience"):
        say(f"stopped by {stopped}: the same command continues from {output / CHECKPOINTS}")
    elif config.export:
        export_model(config, run, summary, prompts.ends)
    say(f"report, with the losses and the samples of every evaluation: {output / REPORT}")


def _nothing_left(tuning: TuningRun, earlier: Earlier) -> bool:
    """Return whether the output folder already contains everything that the command would produce.
    If so, tell the user that nothing is written."""
    config, steps = tuning.config, int(earlier.source.state.get("iteration", 0))
    training, save = tuning.run.config.training, Path(tuning.run.config.checkpoint.save or "")
    patience = PatienceFlags.of(training).early_stopping_patience
    early = stopped_early(save, patience, steps)
    if steps < TrainingPlan(tuning.run.config, tuning.epochs).train_iters and not early:
        return False
    if config.export and not is_exported(config, tuning.run):
        return False
    say(
        f"nothing is left to do: {config.output} was trained to its end, {steps} steps; nothing "
        "was changed. A larger --epochs continues it, another --output begins again"
    )
    return True


def record_of(tuning: TuningRun, earlier: Earlier | None, changes: Sequence[str]) -> TuningRecord:
    """Return the record that a fine-tuning run stores in its checkpoints. If the run continues
    ``earlier``, ``changes`` are its differences from that run."""
    config, counts = tuning.config, tuning.counts

    def names(paths: tuple[str, ...]) -> tuple[str, ...]:
        paths = paths[1::2] if paths and is_weighted(paths) else paths
        return tuple(Path(path).name.partition("?")[0] for path in paths)

    record = TuningRecord(
        base_name(config.model or ""),
        names(config.data),
        names(config.eval_data),
        None if tuning.epochs is None else tuning.epochs.count,
        sum(counts.train),
        sum(counts.valid.values()),
        versions(),
    )
    return record if earlier is None else record.after(earlier.source, changes)


def count_samples(run: Run) -> ExampleCounts:
    """Tokenize a run's examples, or read them from the cache, and count the resulting samples.
    Raises ValueError or OSError, naming the flag and file, if data cannot be used."""
    data = family_of(run.config.model.family).data(run.config, run.tokenizer)
    # The order of samples is computed again once their number is known, so do not log this one.
    loggers = (log_of_packing, log_of_pairs)
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        datasets = data.datasets((1, 1, 0))
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    assert datasets.train is not None
    valid = {name: sum(_lengths(samples)) for name, samples in datasets.valid.items()}
    return ExampleCounts(_lengths(datasets.train), valid)


def _lengths(samples: SampleDataset[Any]) -> tuple[int, ...]:
    """Return the number of samples for each path."""
    return tuple(map(len, getattr(samples, "parts", (samples,))))


class SameSamples(RenumberedSamples[Any]):
    """Held-out samples that are the same in every evaluation: the first ``count`` of a dataset. An
    evaluation reads ``each`` samples, starting over if there are fewer. All evaluations together
    read ``num_samples``."""

    def __init__(
        self, dataset: SampleDataset[Any], count: int, each: int, num_samples: int
    ) -> None:
        super().__init__(dataset)
        self.count, self.each, self.num_samples = count, each, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def number(self, index: int) -> int:
        return checked_index(index, len(self)) % self.each % self.count


def training_data(run: Run, epochs: Epochs | None, held_out: dict[str, int]) -> TrainingData:
    """Return the run's data. Every evaluation reads the same ``held_out`` samples per dataset."""
    plan = TrainingPlan(run.config, epochs)
    data = family_of(run.config.model.family).data(run.config, run.tokenizer)
    train, valid, test = plan.sample_counts
    each = plan.eval_iters * plan.global_batch_size
    valid += each  # for the evaluation before the first step
    prepared = data.training_data((train, min(valid, each), test), plan.batch_sizes)
    same = {
        name: SameSamples(samples, held_out[name], each, valid)
        for name, samples in prepared.datasets.valid.items()
    }
    datasets = Datasets(prepared.datasets.train, same, prepared.datasets.test)
    return prepared._replace(datasets=datasets)
