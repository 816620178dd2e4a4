"""Encodes batches in several processes, in the order they come."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from multiprocessing.connection import Connection

from megatron.data.preprocessing.encode import EncodeConfig, EncodedBatch, Encoder
from megatron.data.preprocessing.inputs import LineBatch

_BATCHES_PER_WORKER = 3


def encode_in_processes(
    batches: Iterable[LineBatch], config: EncodeConfig, workers: int
) -> Generator[EncodedBatch, None, None]:
    """The batches encoded, in order; a bounded number of them is under way at a time.

    A thread per process waits on its pipe. (ProcessPoolExecutor waits for ever on Python 3.10 when
    a worker dies while a batch is being written to it.)

    Raises:
        ChildProcessError: a worker died.
    """
    processes = [_Worker(config) for _ in range(workers)]
    free = deque(processes)
    own = threading.local()

    def take_process() -> None:
        own.process = free.popleft()

    def encode(batch: LineBatch) -> EncodedBatch:
        return own.process.encode(batch)

    threads = ThreadPoolExecutor(workers, initializer=take_process)
    batches = iter(batches)
    under_way: deque[Future[EncodedBatch]] = deque()
    try:
        for batch in islice(batches, workers * _BATCHES_PER_WORKER):
            under_way.append(threads.submit(encode, batch))
        while under_way:
            yield under_way.popleft().result()
            under_way.extend(threads.submit(encode, batch) for batch in islice(batches, 1))
    finally:
        threads.shutdown(cancel_futures=True)
        for process in processes:
            process.stop()


class _Worker:
    """A process that encodes, behind a pipe."""

    def __init__(self, config: EncodeConfig) -> None:
        # A forked child of a process with threads (Rust's, in tokenizers) may hang.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, config), daemon=True)
        self._process.start()
        theirs.close()

    def encode(self, batch: LineBatch) -> EncodedBatch:
        """Has a batch encoded; an error there is raised here.

        Raises:
            ChildProcessError: the process died.
        """
        try:
            self._pipe.send(batch)
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise ChildProcessError(
                "a worker process died, most often because memory ran out; use fewer --workers or "
                "a smaller --chunk-size"
            ) from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stop(self) -> None:
        """Ends the process, which finds its pipe closed."""
        self._pipe.close()
        self._process.join()


def _serve(pipe: Connection, config: EncodeConfig) -> None:
    """What a worker process does until its parent is gone or done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent sees the Ctrl-C and ends its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    encoder = Encoder(config)
    while True:
        try:
            batch = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer: EncodedBatch | Exception = encoder(batch)
        except Exception as error:  # whatever it is, the parent has to hear of it
            answer = error
        try:
            pipe.send(answer)
        except OSError:
            return
