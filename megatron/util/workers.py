"""Worker processes: a process that answers requests, and an ordered map over several of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from megatron.util.processes import death

Request = TypeVar("Request")
Answer = TypeVar("Answer")

_SPAWN = multiprocessing.get_context("spawn")
"""Start method of the workers. A forked child of a process with threads, such as those of the Rust
tokenizers, may hang."""
_SECONDS_TO_END = 5.0
"""Seconds to wait for a process to exit after its pipe is closed, to learn its exit code."""
_ITEMS_PER_WORKER = 4
"""Number of items in flight per worker, so that a worker need not wait for a slower one."""


def usable_processors() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Worker(Generic[Request, Answer]):
    """Process that answers requests over a pipe, one at a time. On the first request, it calls
    ``prepare`` to create the function that answers. The process ends when the pipe is closed,
    including when its parent dies."""

    def __init__(self, prepare: Callable[[], Callable[[Request], Answer]]) -> None:
        self.pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(theirs, prepare), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, request: Request) -> None:
        """Send a request. Raises ChildProcessError if the process died."""
        try:
            self.pipe.send(request)
        except OSError as error:
            raise self._death() from error

    def receive(self) -> Answer:
        """Return the answer to the last request, or raise the request's error. Raises
        ChildProcessError if the process died."""
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise self._death() from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def ask(self, request: Request) -> Answer:
        self.send(request)
        return self.receive()

    def _death(self) -> ChildProcessError:
        self._process.join(_SECONDS_TO_END)
        return ChildProcessError(
            f"a worker process (pid {self._process.pid}) {death(self._process.exitcode)}"
        )

    def stop(self) -> None:
        """End the process."""
        self.pipe.close()
        self._process.join()


def map_in_order(
    items: Iterator[Request],
    prepare: Callable[[], Callable[[Request], Answer]],
    workers: int,
) -> Generator[tuple[Request, Answer], None, None]:
    """Yield (item, answer) in the items' order. ``workers`` processes compute the answers; 0 uses
    this process. Only a few items per worker are in memory at a time. ProcessPoolExecutor is not
    used, because its processes survive if their parent is killed. Raises ChildProcessError if a
    worker died."""
    if not workers:
        answering = prepare()
        for item in items:
            yield item, answering(item)
        return
    processes = [Worker(prepare) for _ in range(workers)]
    free, of_thread = deque(processes), threading.local()
    under_way: deque[tuple[Request, Future[Answer]]] = deque()
    failure: Exception | None = None

    def take_process() -> None:
        of_thread.process = free.popleft()

    def ask(item: Request) -> Answer:
        return of_thread.process.ask(item)

    threads = ThreadPoolExecutor(workers, initializer=take_process)
    try:
        while True:
            while failure is None and len(under_way) < _ITEMS_PER_WORKER * workers:
                try:
                    item = next(items)
                except StopIteration:
                    break
                except Exception as error:  # raise it only after the answers to all earlier items
                    failure = error
                else:
                    under_way.append((item, threads.submit(ask, item)))
            if not under_way:
                break
            item, answer = under_way.popleft()
            yield item, answer.result()
        if failure is not None:
            raise failure
    finally:
        threads.shutdown(cancel_futures=True)
        for process in processes:
            process.stop()


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _serve(pipe: Connection, prepare: Callable[[], Callable[[Any], Any]]) -> None:
    """Answer the requests of a worker process until its parent closes the pipe or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes already provide the parallelism
    answering: Callable[[Any], Any] | None = None
    while True:
        try:
            request = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answering = answering or prepare()
            answer = answering(request)
        except Exception as error:  # the parent raises it, whatever it is
            answer = error
        except BaseException as error:  # such as a panic in a Rust library
            answer = ChildProcessError(f"a worker process failed: {_described(error)}")
        try:
            pipe.send(answer)
        except OSError:
            return
        except Exception as error:  # the answer cannot be pickled
            pipe.send(ChildProcessError(f"a worker process failed: {_described(error)}"))
