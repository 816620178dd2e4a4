"""``finetune.py``: completes the flags, trains, and writes the result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.apps.finetune.config import TuningConfig
from megatron.apps.finetune.during_training import Baseline, SampleTexts
from megatron.apps.finetune.export import (
    REPORT,
    check_output_folder,
    export_model,
    is_exported,
)
from megatron.apps.finetune.held_out import (
    ExampleCounts,
    count_samples,
    training_data,
)
from megatron.apps.finetune.prompts import sample_prompts
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
    ORIGIN,
    check_flags,
    completed,
    has_length,
    is_weighted,
    training_paths,
)
from megatron.apps.finetune.summary import TuningSummary
from megatron.config import Setting, Settings
from megatron.config.command_line import versions
from megatron.features.keep_best.callback import stopped_early
from megatron.run.launch import start_processes
from megatron.run.process import connected
from megatron.run.run import (
    Run,
    RunToolParser,
    run_of,
    show_configuration,
)
from megatron.training.build import build_trainer
from megatron.training.plan import Epochs, TrainingPlan
from megatron.training.writers import Rows, read_metrics
from megatron.util.files import write_whole
from megatron.util.processes import is_main_process
from megatron.util.progress import say

EARLY_STOP = "--early-stopping-patience"
"""How the reason of an end begins that is no interruption."""
EVALUATIONS = 10
"""In a run, where no flag says how many."""
LINES = 50
"""Log lines that a run has at least, if it has as many steps."""
MOST_BETWEEN_LINES = 10
"""Steps between two log lines, likewise."""


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
    if "allow_changed_data" not in settings:
        check_base(config)
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
    pairs = zip(counts.train, training_paths(config), strict=True)
    words = tuple(word for count, path in pairs for word in (str(count), path))
    name = "train_data_path" if config.eval_data else "data_path"
    return settings | {name: Setting(words, ORIGIN)}


def _evaluations(settings: Settings, run: Run, counts: ExampleCounts) -> Settings:
    """Evaluates on all held-out samples a few times, and logs often enough for a curve."""
    batch = run.config.training.global_batch_size
    own = {"eval_iters": math.ceil(max(counts.valid.values(), default=0) / batch)}
    steps = None
    if "train_samples" in settings:
        steps = settings["train_samples"].value // batch
    elif "train_iters" in settings:
        steps = settings["train_iters"].value
    own["log_interval"] = MOST_BETWEEN_LINES
    if steps is not None:
        own["eval_interval"] = max(1, steps // EVALUATIONS)
        own["log_interval"] = min(MOST_BETWEEN_LINES, max(1, steps // LINES))
    return {name: Setting(value, ORIGIN) for name, value in own.items()} | settings


def fine_tune(tuning: TuningRun) -> None:
    """Trains to the end and exports; a run that was stopped exports nothing. Raises ValueError or
    OSError if data or checkpoints cannot be used, or the result cannot be written."""
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
        callbacks = (Baseline(), SampleTexts(run, mesh, prompts, config.sample_tokens))
        notes = {TUNING: record.to_json()}
        trainer = build_trainer(run, mesh, callbacks, data, tuning.epochs, notes, brief=True)
        stopped = trainer.fit()
    if not is_main_process():
        return
    output = Path(config.output)
    summary = TuningSummary(run.config, record, trainer.iteration, _rows(run))
    write_report(summary, output / REPORT)
    if stopped is not None and not stopped.startswith(EARLY_STOP):
        say(f"stopped by {stopped}: the same command continues from {output / CHECKPOINTS}")
    elif config.export:
        export_model(config, run, summary, prompts.ends)
    say(f"report, with the losses and the samples of every evaluation: {output / REPORT}")


def _nothing_left(tuning: TuningRun, earlier: Earlier) -> bool:
    """True if an output folder has all that a command would make, which is then said: nothing is
    written."""
    config, steps = tuning.config, int(earlier.source.state.get("iteration", 0))
    training, save = tuning.run.config.training, Path(tuning.run.config.checkpoint.save or "")
    early = stopped_early(save, training.early_stopping_patience, steps)
    if steps < TrainingPlan(tuning.run.config, tuning.epochs).train_iters and not early:
        return False
    if config.export and not is_exported(config, tuning.run):
        return False
    say(
        f"nothing is left to do: {config.output} was trained to its end, {steps} steps; nothing "
        "was changed. A larger --epochs continues it, another --output begins again"
    )
    return True


def _names(paths: tuple[str, ...]) -> tuple[str, ...]:
    paths = paths[1::2] if paths and is_weighted(paths) else paths
    return tuple(Path(path).name.partition("?")[0] for path in paths)


def record_of(tuning: TuningRun, earlier: Earlier | None, changes: Sequence[str]) -> TuningRecord:
    """The record of a fine-tuning in its checkpoints, which may continue an earlier one with
    ``changes``."""
    config, counts = tuning.config, tuning.counts
    record = TuningRecord(
        base_name(config.model or ""),
        _names(config.data),
        _names(config.eval_data),
        None if tuning.epochs is None else tuning.epochs.count,
        sum(counts.train),
        sum(counts.valid.values()),
        versions(),
    )
    return record if earlier is None else record.after(earlier.source, changes)


def _rows(run: Run) -> Rows:
    metrics = run.config.logging.metrics_file
    return read_metrics(metrics) if metrics and Path(metrics).is_file() else []


def write_report(summary: TuningSummary, path: Path) -> None:
    """Writes the HTML report. Raises OSError if it cannot be written."""
    write_whole(path, report(summary, path.resolve().parent.name).encode())
