#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""Builds the sample indices of a run in advance, without a GPU.

    python tools/build_index.py --workers 8 --world-size 64 [the flags of pretrain_gpt.py]

All files of training, validation and test are checked and indexed, several at a time, in the cache
that the run uses (--data-cache-path, or index-cache/ next to the data); the run then starts without
building anything. --world-size is the number of the run's processes, from which batch sizes may be
derived.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.apps.corpus.prebuilding import prebuild
from megatron.config import ConfigError, RunConfig
from megatron.config.flags import option
from megatron.data.index_cache import IndexCache
from megatron.data.sources import parts_of
from megatron.families import family_names, family_of
from megatron.run.run import Run, RunToolParser, run_of
from megatron.training.plan import TrainingPlan
from megatron.util.errors import one_line
from megatron.util.workers import usable_processors


@dataclass(frozen=True)
class BuildConfig:
    """Build: processes; all flags of pretrain_gpt.py describe the run."""

    workers: int | None = option(None, derived="one per processor")
    """Number of processes that build, each one dataset at a time."""
    world_size: int = option(1)
    """Number of processes of the run."""
    samples: str | None = option(None, derived="--model-family", choices=family_names())
    """Model family of the samples."""


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    config, settings = RunToolParser(BuildConfig, __doc__).parse(argv)
    try:
        if config.world_size < 1 or (config.workers is not None and config.workers < 1):
            raise ConfigError("--workers and --world-size start at 1")
        run = run_of(settings, config.world_size, config.samples)
        if run.config.data.mock_data:
            raise ConfigError("--mock-data needs no index")
        check_writable(run.config)
        build_all(config, run)
    except (ValueError, OSError) as error:
        sys.exit(f"build_index.py: error: {one_line(error)}")


def check_writable(config: RunConfig) -> None:
    """A run continues without a cache that it cannot write; here that would be in vain.

    Raises:
        ConfigError: a folder of the index cache cannot be written.
    """
    blends = parts_of(config).blends()
    paths = {path for blend in blends for source in blend.sources for path in source.paths}
    for path in sorted(paths):
        folder = IndexCache.next_to(path, config.data.data_cache_path).folder
        try:
            assert folder is not None
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ConfigError(
                f"the index of {path} cannot be kept in {folder}: {error}; give --data-cache-path, "
                "here and in the run"
            ) from None


def build_all(config: BuildConfig, run: Run) -> None:
    """Builds all indices and prints the number of samples."""
    began = time.perf_counter()
    plan = TrainingPlan(run.config)
    data = family_of(config.samples or run.config.model.family).data(run.config, run.tokenizer)
    prebuild(data, plan.sample_counts, config.workers or usable_processors())
    # The order of a curriculum is built here.
    datasets = data.datasets(plan.sample_counts, plan.batch_sizes)
    named = {"train": datasets.train, **datasets.valid, **datasets.test}
    for name, samples in named.items():
        if samples is not None:
            print(f"{name}: {len(samples):,} samples")
    print(f"{time.perf_counter() - began:.1f} seconds")


if __name__ == "__main__":
    main()
