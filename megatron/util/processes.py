"""The main process of a run, and worker processes: one that answers requests, and a map over
several."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, TypeVar

Request = TypeVar("Request")
Answer = TypeVar("Answer")

_SPAWN = multiprocessing.get_context("spawn")
"""A forked child of a process with threads (Rust's, in tokenizers) may hang."""
_SECONDS_TO_END = 5.0
"""For which a process whose pipe is closed may still run; its exit status is known then."""
_ITEMS_PER_WORKER = 4
"""Under way at a time, so that a worker need not wait for a slower one."""


def is_main_process() -> bool:
    """Whether this process prints and writes for all."""
    return os.environ.get("RANK", "0") == "0"


def is_for_users(error: BaseException) -> bool:
    """Whether this package raised an error about the user's input, with a message for users, or
    the system did about files. What is raised deeper (torch, deepspeed) is not."""
    frames = traceback.extract_tb(error.__traceback__)
    own = Path(__file__).resolve().parent.parent
    return isinstance(error, OSError) or (
        isinstance(error, ValueError) and Path(frames[-1].filename).is_relative_to(own)
    )


def name_lost_pages() -> None:
    """Makes this process end with a message where the system cannot give it a page of a file that
    is mapped into memory: the file was cut short, its disk failed, or shared memory is full. The
    signal, SIGBUS, otherwise kills it without a word. Where the system is not Linux it remains so.
    """
    if sys.platform != "linux" or sys.maxsize < 2**32:
        return
    action = _SignalAction(ctypes.cast(_on_lost_page, ctypes.c_void_p), flags=_SA_SIGINFO)
    ctypes.CDLL(None).sigaction(int(signal.SIGBUS), ctypes.byref(action), None)


class _SignalAction(ctypes.Structure):
    """``struct sigaction`` of 64-bit Linux."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_SA_SIGINFO = 4
_ADDRESS_IN_SIGINFO = 16


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
def _on_lost_page(number: int, info: int, context: int) -> None:
    """The signal comes out of an instruction that reads or writes the page, so that Python can run
    here; it cannot return there."""
    try:
        address = ctypes.c_void_p.from_address(info + _ADDRESS_IN_SIGINFO).value or 0
        sys.stdout.flush()
        message = f"error: {_lost_page(address)}\n"
    except BaseException:
        message = "error: a file that is mapped into memory was cut short or cannot be read\n"
    os.write(2, message.encode(errors="replace"))
    os._exit(2)


def _lost_page(address: int) -> str:
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            fields = line.split(maxsplit=5)
            start, stop = (int(end, 16) for end in fields[0].split("-"))
            if start <= address < stop and len(fields) == 6:
                name = fields[5].rstrip("\n")
                break
        else:
            return "memory of this process cannot be read (SIGBUS)"
    if name.startswith(("/dev/shm/", "/SYSV", "/memfd:")):
        return f"{name}: shared memory is full; make /dev/shm larger, or use fewer processes"
    size = os.stat(name).st_size if os.path.exists(name) else 0
    if int(fields[2], 16) + address - start < size:
        return f"{name} cannot be read: its disk or network failed"
    return (
        f"{name} was cut short or deleted while it was read, and has {size} bytes; restore it "
        "(delete it if it is in an index-cache), and resume from the last checkpoint"
    )


def usable_processors() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Worker(Generic[Request, Answer]):
    """A process that answers requests over a pipe, one at a time, by the function that ``prepare``
    makes there at the first request. It ends when the pipe is closed, also when its parent dies."""

    def __init__(self, prepare: Callable[[], Callable[[Request], Answer]]) -> None:
        self.pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(theirs, prepare), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, request: Request) -> None:
        """Sends a request; ChildProcessError if the process died."""
        try:
            self.pipe.send(request)
        except OSError as error:
            raise self._death() from error

    def receive(self) -> Answer:
        """The answer to the last request, or raises its error; ChildProcessError if the process
        died."""
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
        """Ends the process."""
        self.pipe.close()
        self._process.join()


def map_in_order(
    items: Iterator[Request],
    prepare: Callable[[], Callable[[Request], Answer]],
    workers: int,
) -> Generator[tuple[Request, Answer], None, None]:
    """Each item and its answer, in order, from several processes; a few items for each are in
    memory at a time. With no workers, in this process. Not ProcessPoolExecutor: its processes live
    on when their parent is killed. Raises ChildProcessError if a worker process died."""
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
                except Exception as error:  # raised after all items before it
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


def death(exit_code: int | None) -> str:
    """How a process died, for a message. Of SIGKILL, which nobody can catch, the sender is not
    known: the system sends it when memory runs out."""
    if exit_code is None:
        return "closed its connection"
    if exit_code >= 0:
        return f"ended with exit status {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    if name == "SIGKILL":
        name += " (the system sends it when memory runs out; fewer processes need less)"
    return f"was killed by {name}"


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _serve(pipe: Connection, prepare: Callable[[], Callable[[Any], Any]]) -> None:
    """Main function of a worker process, until its parent closes the pipe or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent sees the Ctrl-C and ends its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    answering: Callable[[Any], Any] | None = None
    while True:
        try:
            request = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answering = answering or prepare()
            answer = answering(request)
        except Exception as error:  # of any kind: the parent raises it
            answer = error
        except BaseException as error:  # a panic of a library in Rust
            answer = ChildProcessError(f"a worker process failed: {_described(error)}")
        try:
            pipe.send(answer)
        except OSError:
            return
        except Exception as error:  # which cannot be pickled
            pipe.send(ChildProcessError(f"a worker process failed: {_described(error)}"))
