"""Building of a run's index cache in advance, in several processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.data.build import DatasetBuilder, SourceReader
from megatron.data.index_cache import IndexCache
from megatron.data.pipeline import DataPipeline
from megatron.data.samples import Documents, SampleRecipe
from megatron.data.sources import DataSource
from megatron.util.progress import progress_bar

Job = Callable[[], object]


def prebuild(data: DataPipeline, sample_counts: tuple[int, int, int], workers: int) -> None:
    """Build the index cache of a run in advance, in several processes. First all files are opened,
    which checks token ids or reads raw text, then the datasets of each file are built. Raises the
    errors of :meth:`DatasetBuilder.datasets`."""
    builder, parts, counts = data.builder, data.parts, data.needed(sample_counts)
    groups = ([parts.train] if parts.train else [], parts.valid.values(), parts.test.values())
    files = {
        (source.kind, path, source.text_key): source
        for blends, count in zip(groups, counts, strict=True)
        if count
        for blend in blends
        for source in blend.sources
        for path in source.paths
        if source.kind in builder.readers
    }

    def open_one(path: str, source: DataSource) -> None:
        with suppress(FileNotFoundError):  # the next steps report it, with the flag
            builder.open(source, path)

    in_processes([partial(open_one, path, s) for (_, path, _), s in files.items()], workers)
    jobs: list[Job] = []

    def recording(kind: str) -> SourceReader:
        reader = builder.reader(kind)
        return SourceReader(reader.open, _Recording(reader.recipe, jobs))

    readers = {kind: partial(recording, kind) for kind in builder.readers}
    DatasetBuilder(readers, builder.cache_path, builder.exact).datasets(parts, counts)
    in_processes(jobs, workers)


@dataclass(frozen=True)
class _Recording:
    recipe: SampleRecipe[Any]
    jobs: list[Job]

    def units(self, documents: Documents) -> int:
        return self.recipe.units(documents)

    def build(
        self, documents: Documents, units: range, num_samples: int, name: str, cache: IndexCache
    ) -> Any:
        self.jobs.append(lambda: self.recipe.build(documents, units, num_samples, name, cache))
        return range(num_samples)  # placeholder: samples are not read here


_jobs: list[Job] = []
"""Jobs of a process that `in_processes` has forked; empty in other processes."""


def in_processes(jobs: Sequence[Job], workers: int) -> None:
    """Run all jobs in forked processes, up to `workers` at a time. Raises the first error of a job;
    no more jobs start after it. Raises OSError if a process was killed."""
    if workers <= 1 or len(jobs) <= 1:
        for job in jobs:
            job()
        return
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(min(workers, len(jobs)), fork, _jobs.extend, (jobs,)) as pool:
        try:
            futures = [pool.submit(_run_job, n) for n in range(len(jobs))]
            with progress_bar("indexing", total=len(jobs), unit=" jobs") as bar:
                for future in as_completed(futures):
                    future.result()
                    bar.update()
        except BrokenProcessPool:
            raise OSError(
                "a process that built indices was killed; if memory is too small for several at "
                "once, give fewer --workers"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _run_job(number: int) -> None:
    _jobs[number]()
