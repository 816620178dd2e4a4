"""Builds the cached index arrays of a run beforehand, in several processes.

The files are opened first, which checks token ids or reads raw text, then every dataset of every
part and blend is built; each job fills one entry of the cache, under the name that the run will
look for. What remains, the order of blends, is left to whoever then builds the datasets as the run
does.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from megatron.data.build import DatasetBuilder, SourceReader
from megatron.data.index_cache import IndexCache
from megatron.data.pipeline import DataPipeline
from megatron.data.samples import Documents, Piece, SampleRecipe
from megatron.data.sources import Source
from megatron.util.progress import progress_bar

Job = Callable[[], object]


def prebuild(data: DataPipeline, sample_counts: tuple[int, int, int], workers: int) -> None:
    """Open all files of a run and build the datasets made of each, `workers` at a time.

    Args:
        sample_counts: samples wanted for training, and for each set of validation and test.

    Raises:
        ValueError, OSError: files that cannot be used; the message names flag and file.
    """
    parts = data.parts
    readers = {name: _made_once(make) for name, make in data.readers().items()}
    train, valid, test = sample_counts
    blends = [
        *([parts.train] if parts.train and train else []),
        *(parts.valid.values() if valid else []),
        *(parts.test.values() if test else []),
    ]
    files = {
        (source.kind, path, source.text_key): source
        for blend in blends
        for source in blend.sources
        for path in source.paths
        if source.kind in readers
    }
    opening = [_opening(readers[kind], path, source) for (kind, path, _), source in files.items()]
    in_processes(opening, workers)
    jobs: list[Job] = []
    recording = {name: _recording(make, jobs) for name, make in readers.items()}
    DatasetBuilder(recording, data.config.data.data_cache_path).datasets(parts, sample_counts)
    in_processes(jobs, workers)


def _made_once(make: Callable[[], SourceReader]) -> Callable[[], SourceReader]:
    """The same reader whenever it is asked for."""
    made: list[SourceReader] = []

    def get() -> SourceReader:
        if not made:
            made.append(make())
        return made[0]

    return get


def _opening(reader: Callable[[], SourceReader], path: str, source: Source) -> Job:
    def job() -> None:
        with suppress(FileNotFoundError):  # left to the builder, which knows the flag
            reader().open(path, source)

    return job


def _recording(make: Callable[[], SourceReader], jobs: list[Job]) -> Callable[[], SourceReader]:
    def get() -> SourceReader:
        reader = make()
        return SourceReader(reader.open, _Recording(reader.recipe, jobs))

    return get


@dataclass(frozen=True)
class _Recording:
    """A recipe that notes what is to be built."""

    recipe: SampleRecipe[Any]
    jobs: list[Job]

    def units(self, documents: Documents) -> int:
        return self.recipe.units(documents)

    def build(
        self, documents: Documents, units: range, num_samples: int, name: str, cache: IndexCache
    ) -> _ToBeBuilt:
        self.jobs.append(lambda: self.recipe.build(documents, units, num_samples, name, cache))
        return _ToBeBuilt(num_samples)


@dataclass(frozen=True)
class _ToBeBuilt:
    """Stands for samples that are not there yet."""

    num_samples: int

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int, /) -> Any:
        raise AssertionError("samples that are not built")

    def origin(self, index: int, /) -> Sequence[Piece]:
        raise AssertionError("samples that are not built")


def in_processes(jobs: Sequence[Job], workers: int) -> None:
    """Do all jobs, up to `workers` at a time, in processes that are forked off this one.

    Raises:
        Exception: the first one that a job raised; no other job is begun then.
        OSError: a process was killed, as by the system when memory runs out.
    """
    if workers <= 1 or len(jobs) <= 1:
        for job in jobs:
            job()
        return
    context = multiprocessing.get_context("fork")
    next_job = context.Value("q", 0)
    errors = context.SimpleQueue()

    def work() -> None:
        while True:
            with next_job.get_lock():
                number = next_job.value
                next_job.value += 1
            if number >= len(jobs):
                return
            try:
                jobs[number]()
            except Exception as error:  # raised again in the parent
                next_job.value = len(jobs)
                errors.put(error)
                return

    processes = [context.Process(target=work) for _ in range(min(workers, len(jobs)))]
    try:
        for process in processes:
            process.start()
        with progress_bar("indexing", total=len(jobs), unit=" jobs") as bar:
            while alive := [process.sentinel for process in processes if process.is_alive()]:
                wait(alive, timeout=0.2)
                bar.update(min(next_job.value, len(jobs)) - bar.n)
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
    if not errors.empty():
        raise errors.get()
    killed = [process for process in processes if process.exitcode]
    if killed:
        raise OSError(
            f"a process that built indices ended with status {killed[0].exitcode}; with too little "
            "memory for several at once, give fewer --workers"
        )
