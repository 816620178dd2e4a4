#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Measures the difficulty of the training samples of a run, for a curriculum.

    python tools/analyze_data.py --analyzing-metric vocab_rarity --analyzing-num-threads 8 \
        --save analysis [the flags of pretrain_gpt.py]

It writes files such as analysis/vocab_rarity/vocab_rarity_index_to_sample.bin and .idx, for
"data_efficiency" of the DeepSpeed JSON; see docs/guides/curriculum.md. The flags that define the
samples (data, sequence length, seed, length of the run) must be those of the run. --save is the
output folder.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config.flags import ConfigError, option
from megatron.config.kinds.curriculum import CurriculumConfig, without_sampling
from megatron.data.kinds.curriculum.analysis import METRICS, MetricSummary, analyse
from megatron.training.run import Run, RunToolParser, run_data, run_of
from megatron.util.errors import end_with_reader, one_line
from megatron.util.progress import progress_bar


@dataclass(frozen=True)
class AnalysisConfig:
    """Analysis: metrics and processes; all flags of pretrain_gpt.py describe the run."""

    analyzing_metric: tuple[str, ...] = option(("vocab_rarity",))
    """Metrics: seqlen (tokens without padding), vocab_rarity (how rare the tokens are)."""
    analyzing_num_threads: int = option(1)
    """Number of processes that read the samples."""
    world_size: int = option(1)
    """Number of processes of the run."""

    def check(self) -> None:
        """Raises ConfigError for invalid values."""
        unknown = set(self.analyzing_metric) - set(METRICS)
        if unknown:
            raise ConfigError(
                f"--analyzing-metric {min(unknown)} must be one of {', '.join(METRICS)}"
            )
        for flag, value in (
            ("--analyzing-num-threads", self.analyzing_num_threads),
            ("--world-size", self.world_size),
        ):
            if value < 1:
                raise ConfigError(f"{flag} {value} must be positive")


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    config, settings = RunToolParser(AnalysisConfig, __doc__).parse(argv)
    try:
        started = time.perf_counter()
        config.check()
        summaries = measure(config, run_of(settings, config.world_size))
    except (ValueError, OSError) as error:
        sys.exit(f"analyze_data.py: error: {one_line(error)}")
    report(summaries, time.perf_counter() - started)


def measure(config: AnalysisConfig, run: Run) -> list[MetricSummary]:
    """Writes the files of each metric.

    Raises:
        ValueError, OSError: the flags are invalid, or files cannot be read or written.
    """
    folder = run.config.checkpoint.save
    if folder is None:
        raise ConfigError("missing --save, the folder for the results")
    plain = run.config.with_kind(without_sampling(run.config.kind(CurriculumConfig)))
    datasets = run_data(dataclasses.replace(run, config=plain)).datasets
    if datasets.train is None:
        raise ConfigError("--skip-train: there are no training samples to measure")
    rows = plain.model.vocabulary.padded
    assert rows is not None
    names = tuple(dict.fromkeys(config.analyzing_metric))
    with progress_bar("measuring", unit=" samples") as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return analyse(datasets.train, names, folder, rows, config.analyzing_num_threads, show)


def report(summaries: Sequence[MetricSummary], seconds: float) -> None:
    """Prints the folder and the distribution of each metric."""
    for metric in summaries:
        spread = ", ".join(f"{share}% {value}" for share, value in metric.percentiles.items())
        print(
            f"{metric.name}: {metric.samples:,} samples, {metric.values:,} values ({spread}) "
            f"in {metric.folder}"
        )
    print(f"{seconds:.1f} seconds")


if __name__ == "__main__":
    end_with_reader()
    main()
