"""Applies a step to batches in several processes, in the order they come."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from multiprocessing.connection import Connection
from typing import Protocol

from megatron.data.collection.lines import Mapped
from megatron.data.preprocessing.inputs import LineBatch

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
    processes = [_Worker(step) for _ in range(workers)]
    free = deque(processes)
    of_thread = threading.local()

    def take_process() -> None:
        of_thread.process = free.popleft()

    def apply(batch: LineBatch) -> Mapped:
        return of_thread.process.apply(batch)

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


class _Worker:
    """A process behind a pipe; it ends when the pipe is closed, also by the parent's death."""

    def __init__(self, step: Step) -> None:
        # A forked child of a process with threads (Rust's, in tokenizers) may hang.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, step), daemon=True)
        self._process.start()
        theirs.close()

    def apply(self, batch: LineBatch) -> Mapped:
        """Raises ChildProcessError when the process died, and what the step raised."""
        try:
            self._pipe.send(batch)
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise ChildProcessError(
                "a worker process died, most often because memory ran out; use fewer --workers"
            ) from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stop(self) -> None:
        self._pipe.close()
        self._process.join()


def _serve(pipe: Connection, step: Step) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent sees the Ctrl-C and ends its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    batch_step: BatchStep | None = None
    while True:
        try:
            batch = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            batch_step = batch_step or step.build()
            answer: Mapped | Exception = batch_step(batch)
        except Exception as error:  # whatever it is, the parent has to hear of it
            answer = error
        try:
            pipe.send(answer)
        except OSError:
            return
