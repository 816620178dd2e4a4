"""Applies a step to batches in several processes, in the order they come."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Protocol

from megatron.corpus.collection.lines import Mapped
from megatron.corpus.preprocessing.inputs import LineBatch
from megatron.util.processes import Worker

_BATCHES_PER_WORKER = 3

BatchStep = Callable[[LineBatch], Mapped]


class Step(Protocol):
    """What a job does; pickled and sent to the workers."""

    def build(self) -> BatchStep:
        """Loads what it needs. The same batch gives the same result in every process."""


def map_batches(
    batches: Iterable[LineBatch], step: Step, workers: int
) -> Generator[tuple[LineBatch, Mapped], None, None]:
    """Each batch and what the step made of it, in order; few of them are in memory at a time.

    Raises:
        ChildProcessError: a worker died.
    """
    if workers == 1:
        own = step.build()
        for batch in batches:
            yield batch, own(batch)
        return
    processes = [Worker[LineBatch, Mapped](step.build) for _ in range(workers)]
    free = deque(processes)
    of_thread = threading.local()

    def take_process() -> None:
        of_thread.process = free.popleft()

    def apply(batch: LineBatch) -> Mapped:
        return of_thread.process.ask(batch)

    threads = ThreadPoolExecutor(workers, initializer=take_process)
    batches = iter(batches)
    under_way: deque[tuple[LineBatch, Future[Mapped]]] = deque()
    try:
        for batch in islice(batches, workers * _BATCHES_PER_WORKER):
            under_way.append((batch, threads.submit(apply, batch)))
        while under_way:
            batch, result = under_way.popleft()
            yield batch, result.result()
            under_way.extend((b, threads.submit(apply, b)) for b in islice(batches, 1))
    finally:
        threads.shutdown(cancel_futures=True)
        for process in processes:
            process.stop()
