"""``finetune.py``: completes the flags, trains, and writes the result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from megatron.config import Setting, Settings
from megatron.finetune.config import TuningConfig
from megatron.finetune.during_training import Baseline, SampleTexts
from megatron.finetune.export import REPORT, check_output_folder, export_model
from megatron.finetune.held_out import ExampleCounts, count_samples, training_data
from megatron.finetune.prompts import sample_prompts
from megatron.finetune.report import report
from megatron.finetune.settings import (
    CHECKPOINTS,
    ORIGIN,
    check_flags,
    completed,
    has_length,
    is_weighted,
)
from megatron.finetune.summary import TuningSummary
from megatron.training.build import build_trainer
from megatron.training.launch import start_processes
from megatron.training.plan import Epochs
from megatron.training.plots import read_metrics
from megatron.training.process import connected
from megatron.training.run import Run, RunToolParser, run_of, show_configuration
from megatron.util.files import write_whole
from megatron.util.processes import is_main_process
from megatron.util.progress import say

EARLY_STOP = "--early-stopping-patience"
"""How the reason of an end begins that is no interruption."""
EVALUATIONS = 10
"""In a run, where no flag says how many."""


class TuningRun(NamedTuple):
    """A fine-tuning, completed."""

    config: TuningConfig
    run: Run
    epochs: Epochs | None
    counts: ExampleCounts


def parse(description: str | None = None, argv: Sequence[str] | None = None) -> TuningRun:
    """A fine-tuning of a command line, in each of its processes, which it starts if the flags say
    so. Raises ValueError or OSError if a flag, the model or the data cannot be used; the message
    names it."""
    config, settings = RunToolParser(TuningConfig, description).parse(argv)
    check_flags(config, settings)
    check_output_folder(config)
    return planned(config, settings, start_processes(settings, argv))


def planned(config: TuningConfig, settings: Settings, processes: int) -> TuningRun:
    """Completes the settings of a fine-tuning, whose length depends on its examples."""
    settings = {"family": Setting("gpt", ORIGIN)} | settings
    settings = completed(config, settings, processes)
    first = settings
    if not has_length(settings):
        first = settings | {"train_samples": Setting(10**6, ORIGIN)}
    run = run_of(first, processes)
    counts = count_samples(run)
    settings = _by_examples(config, settings, counts)
    epochs = None
    if not has_length(settings):
        count = config.epochs or (1 if "preference" in settings else 3)
        epochs = Epochs(count, sum(counts.train))
        how = f"derived: {count} epochs of {epochs.samples} samples"
        settings["train_samples"] = Setting(count * epochs.samples, how)
    settings = _evaluations(settings, run, counts)
    run = run_of(settings, processes)
    show_configuration(run)
    return TuningRun(config, run, epochs, counts)


def _by_examples(config: TuningConfig, settings: Settings, counts: ExampleCounts) -> Settings:
    """Several paths without weights are used to the same extent each."""
    if len(config.data) < 2 or is_weighted(config.data):
        return dict(settings)
    pairs = zip(counts.train, config.data, strict=True)
    words = tuple(word for count, path in pairs for word in (str(count), path))
    name = "train_data_path" if config.eval_data else "data_path"
    return settings | {name: Setting(words, ORIGIN)}


def _evaluations(settings: Settings, run: Run, counts: ExampleCounts) -> Settings:
    """Evaluates on all held-out samples, now and then."""
    batch = run.config.training.global_batch_size
    own = {"eval_iters": math.ceil(max(counts.valid.values(), default=0) / batch)}
    length = settings.get("train_samples")
    if length is not None:
        own["eval_interval"] = max(1, length.value // batch // EVALUATIONS)
    elif "train_iters" in settings:
        own["eval_interval"] = max(1, settings["train_iters"].value // EVALUATIONS)
    return {name: Setting(value, ORIGIN) for name, value in own.items()} | settings


def fine_tune(tuning: TuningRun) -> None:
    """Trains to the end and exports; a run that was stopped exports nothing. Raises ValueError or
    OSError if data or checkpoints cannot be used, or the result cannot be written."""
    run, config = tuning.run, tuning.config
    assert config.output is not None
    with connected(run, config) as mesh:
        data = training_data(run, tuning.epochs, tuning.counts.valid)
        prompts = sample_prompts(config, run, data)
        run = replace(run, ends=prompts.ends or None)
        callbacks = (Baseline(), SampleTexts(run, mesh, prompts, config.sample_tokens))
        trainer = build_trainer(run, mesh, callbacks, data, tuning.epochs)
        stopped = trainer.fit()
    if not is_main_process():
        return
    output = Path(config.output)
    summary = summary_of(tuning, trainer.iteration)
    write_report(summary, output / REPORT)
    if stopped is not None and not stopped.startswith(EARLY_STOP):
        say(f"stopped by {stopped}: the same command continues from {output / CHECKPOINTS}")
    elif config.export:
        export_model(config, run, summary, prompts.ends)
    say(f"report: {output / REPORT}")


def summary_of(tuning: TuningRun, steps: int) -> TuningSummary:
    """What a fine-tuning has done after a number of steps."""
    run, config, counts = tuning.run, tuning.config, tuning.counts
    paths = config.data[1::2] if is_weighted(config.data) else config.data
    metrics = run.config.logging.metrics_file
    return TuningSummary(
        run.config,
        config.model or "",
        paths,
        None if tuning.epochs is None else tuning.epochs.count,
        sum(counts.train),
        sum(counts.valid.values()),
        steps,
        read_metrics(metrics) if metrics and Path(metrics).is_file() else [],
    )


def write_report(summary: TuningSummary, path: Path) -> None:
    """Writes the HTML report. Raises OSError if it cannot be written."""
    write_whole(path, report(summary, path.resolve().parent.name).encode())
