#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Measures the difficulty of the training samples of a run, for a curriculum.

    python tools/analyze_data.py --analyzing-metric vocab_rarity --analyzing-num-threads 8 \
        --save analysis [the flags of pretrain_gpt.py]

It writes files such as analysis/vocab_rarity/vocab_rarity_index_to_sample.bin and .idx, for
"data_efficiency" of the DeepSpeed JSON; see docs/guides/curriculum.md. The flags that define the
samples (data, sequence length, seed, length of the run or --train-data-exact-num-epochs) must be
those of the run. --save is the output folder.

Several machines share the work in two steps: --analyzing-task map on each, with
--analyzing-num-workers and its --analyzing-worker-id, then --analyzing-task reduce on one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config import Setting, Settings
from megatron.config.flags import NOT_NEGATIVE, POSITIVE, ConfigError, option
from megatron.config.output import check_output
from megatron.config.training import RUN_LENGTHS
from megatron.families import family_of
from megatron.features.curriculum.analysis import (
    METRICS,
    VOCABULARY,
    Analysis,
    MetricSummary,
    Progress,
    analyse,
)
from megatron.features.curriculum.flags import CurriculumConfig, without_sampling
from megatron.run.run import Run, RunToolParser, run_of
from megatron.training.plan import TrainingPlan
from megatron.util.progress import progress_bar

TASKS = ("map", "reduce")
UNUSED = {"train_iters": 1, "lr": 1.0, "eval_iters": 0}
"""Values of a run that have no effect on a number of whole epochs, and need not be there."""


@dataclass(frozen=True)
class AnalysisConfig:
    """Analysis: metrics and processes; all flags of pretrain_gpt.py describe the run."""

    analyzing_metric: tuple[str, ...] = option(("vocab_rarity",))
    """Metrics: total_vocab_freq (how often each token occurs), vocab_rarity (how rare the tokens
    of a sample are), seqlen (its tokens without padding), seqlen_vocab_rarity (by length, then by
    rarity)."""
    analyzing_task: str | None = option(None, choices=TASKS, derived="map and reduce")
    """Step: map measures the samples of a worker, reduce merges what all workers have written. In
    two steps the rarities need the files of total_vocab_freq in --save."""
    analyzing_data_type: str | None = option(None, choices=("GPT", "BERT"))
    """Type of the samples, as --model-family gpt or bert."""
    analyzing_num_workers: int = option(1, bounds=POSITIVE)
    """Number of workers that share the samples, each a map of its own."""
    analyzing_worker_id: int = option(0, bounds=NOT_NEGATIVE)
    """Number of the worker of this map, from 0."""
    analyzing_num_threads: int = option(1, bounds=POSITIVE)
    """Number of parts that the samples of a worker are divided into, and of the processes that read
    them, of which no more than there are cores run."""
    analyzing_num_threads_reduce: int = option(1, bounds=POSITIVE)
    """Number of processes of the reduce."""
    analyzing_specific_threads: tuple[int, ...] = option(())
    """Numbers of the parts to measure, from 0: those that an earlier map has not finished."""
    world_size: int = option(1, bounds=POSITIVE)
    """Number of processes of the run."""

    def check(self) -> None:
        """Raises ConfigError for values that do not fit together."""
        unknown = set(self.analyzing_metric) - set(METRICS)
        if unknown:
            raise ConfigError(
                f"--analyzing-metric {min(unknown)} must be one of {', '.join(METRICS)}"
            )
        for flag, number, count_flag, count in (
            ("worker-id", self.analyzing_worker_id, "num-workers", self.analyzing_num_workers),
            *(
                ("specific-threads", number, "num-threads", self.analyzing_num_threads)
                for number in self.analyzing_specific_threads
            ),
        ):
            if not 0 <= number < count:
                raise ConfigError(
                    f"--analyzing-{flag} {number} must be from 0 to {count - 1}, one less than "
                    f"--analyzing-{count_flag}"
                )
        if self.analyzing_task is None and self.analyzing_num_workers > 1:
            raise ConfigError(
                f"--analyzing-num-workers {self.analyzing_num_workers} share the work in two "
                "steps: give --analyzing-task map on each, then --analyzing-task reduce on one"
            )


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = RunToolParser(AnalysisConfig, __doc__)
    try:
        config, settings = parser.parse(argv)
        started = time.perf_counter()
        config.check()
        run = run_of(completed(settings, config.analyzing_data_type), config.world_size)
        summaries = measure(config, run)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    report(summaries, time.perf_counter() - started)


def completed(settings: Settings, data_type: str | None) -> Settings:
    """The settings of a run with the family of its data, and with what a number of epochs makes
    superfluous. Raises ConfigError if they contradict."""
    if data_type is not None:
        flag, family = f"--analyzing-data-type {data_type}", data_type.lower()
        named = settings.get("family", Setting(family, flag))
        if named.value != family:
            raise ConfigError(f"{flag} contradicts --model-family {named.value}: give one of them")
        settings = settings | {"family": named}
    if "train_data_exact_num_epochs" not in settings:
        return settings
    unused = {name: Setting(value, "this program") for name, value in UNUSED.items()}
    if {"epochs", *RUN_LENGTHS} & settings.keys():
        del unused["train_iters"]
    return unused | settings


def measure(config: AnalysisConfig, run: Run) -> list[MetricSummary]:
    """Writes the files of each metric, or those of one step.

    Raises:
        ValueError, OSError: the flags are invalid, or files cannot be read or written.
    """
    folder = run.config.checkpoint.save
    if folder is None:
        raise ConfigError("missing --save, the folder for the results")
    check_output("--save", Path(folder) / "any")
    plain = run.config.with_sections(without_sampling(run.config.section(CurriculumConfig)))
    plan = TrainingPlan(plain)
    exact = plain.data.train_data_exact_num_epochs is not None
    count = 1 if exact else plan.sample_counts[0]
    data = family_of(plain.model.family).data(plain, run.tokenizer)
    train = data.datasets((count, 0, 0), plan.batch_sizes).train
    if train is None:
        raise ConfigError("--skip-train: there are no training samples to measure")
    rows = plain.model.vocabulary.padded
    assert rows is not None
    analysis = Analysis(
        train,
        tuple(dict.fromkeys(config.analyzing_metric)),
        Path(folder),
        rows,
        plain.model.seq_length,
        config.analyzing_num_workers,
        config.analyzing_num_threads,
    )
    with progress_bar("measuring", unit=" samples") as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return step(config, analysis, show)


def step(config: AnalysisConfig, analysis: Analysis, progress: Progress) -> list[MetricSummary]:
    """Both steps, or the one that the flags name; a map alone has no results."""
    if config.analyzing_task is None:
        return analyse(analysis, progress)
    if config.analyzing_task == "reduce":
        return analysis.reduce(config.analyzing_num_threads_reduce)
    analysis.map(config.analyzing_worker_id, config.analyzing_specific_threads, progress)
    return []


def report(summaries: Sequence[MetricSummary], seconds: float) -> None:
    """Prints the folder and the distribution of each metric."""
    for metric in summaries:
        spread = ", ".join(f"{share}% {value}" for share, value in metric.percentiles.items())
        values = "tokens that occur" if metric.name == VOCABULARY else "values"
        print(
            f"{metric.name}: {metric.samples:,} samples, {metric.values:,} {values} ({spread}) "
            f"in {metric.folder}"
        )
    print(f"{seconds:.1f} seconds")


if __name__ == "__main__":
    main()
