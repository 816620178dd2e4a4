"""Encodes batches in several processes, in the order they come."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import connection

from megatron.data.preprocessing.encode import EncodeConfig, EncodedBatch, Encoder
from megatron.data.preprocessing.inputs import LineBatch

_BATCHES_PER_WORKER = 3


def encode_in_processes(
    batches: Iterable[LineBatch], config: EncodeConfig, workers: int
) -> Generator[EncodedBatch, None, None]:
    """The batches encoded, in order; a bounded number of them is under way at a time.

    Raises:
        ChildProcessError: a worker died.
    """
    pool = ProcessPoolExecutor(
        workers,
        # A forked child of a process with threads (Rust's, in tokenizers) may hang.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(config,),
    )
    batches = iter(batches)
    under_way: deque[Future[EncodedBatch]] = deque()
    try:
        for batch in islice(batches, workers * _BATCHES_PER_WORKER):
            under_way.append(pool.submit(_encode, batch))
        while under_way:
            yield under_way.popleft().result()
            under_way.extend(pool.submit(_encode, batch) for batch in islice(batches, 1))
    except BrokenProcessPool as error:
        raise ChildProcessError(
            "a worker process died, most often because memory ran out; use fewer --workers or a "
            "smaller --chunk-size"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


class _Worker:
    """The encoder of a worker process; it is made once there, not sent with every batch."""

    encoder: Encoder


def _start_worker(config: EncodeConfig) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent sees the Ctrl-C and ends its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _Worker.encoder = Encoder(config)


def _encode(batch: LineBatch) -> EncodedBatch:
    return _Worker.encoder(batch)


def _exit_with_parent() -> None:
    """A killed parent closes no pipe that its workers wait on: without this they wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
