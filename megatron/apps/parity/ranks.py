"""Ranks of a run on this machine: their environment, and processes that yield results."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.util.processes import death

GRACE_SECONDS = 3.0  # for the other ranks to end after one did, to find the one that failed first
LAST_LINES = 10
_LOST_PEER = re.compile(r"gloo|Connection (closed|reset)|Broken pipe|DistNetworkError")


class RankError(RuntimeError):
    """A process died; the message names its rank, exit status and last lines of output."""


class Ranks:
    """Processes that run a generator function of a module and return the values that it yields.
    Each is a new interpreter on this machine's CPU, which imports the main module; leaving the
    context, or the end of the process that started them, ends them. Their output is kept for
    :class:`RankError`."""

    def __init__(self, size: int, function: Callable[..., Iterable[Any]], *args: Any) -> None:
        self._logs = tempfile.TemporaryDirectory(prefix="ranks-")
        # The store listens before any rank starts, so no other program can take its port.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: list[_Worker] = []
        try:
            interfaces = {name for _, name in socket.if_nameindex()}
            cpu = {
                "GLOO_SOCKET_IFNAME": "lo" if "lo" in interfaces else "lo0",
                "CUDA_VISIBLE_DEVICES": "",
                "DS_ACCELERATOR": "cpu",
            }
            for rank in range(size):
                with environment(rank_environment(rank, size, self._store.port) | cpu):
                    log = Path(self._logs.name) / f"{rank}.log"
                    self._workers.append(_start(rank, log, function, args))
        except BaseException:  # an interrupt too must leave no processes
            self.close()
            raise

    def results(self) -> list[Any]:
        """Return the next value that the function yields on each rank. Raises RankError if a
        process ended instead."""
        values: dict[int, Any] = {}
        pending: dict[Any, _Worker] = {worker.pipe: worker for worker in self._workers}
        while pending:
            for pipe in wait(list(pending)):
                worker = pending.pop(pipe)
                try:
                    values[worker.rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    raise RankError(self._who_died(worker)) from None
        return [values[rank] for rank in range(len(self._workers))]

    def _who_died(self, first: _Worker) -> str:
        """Ranks die after losing a peer: such a rank is named only if there is no other."""
        for worker in self._workers:
            worker.process.join(GRACE_SECONDS if worker is first else GRACE_SECONDS / 4)
        ended = [worker for worker in self._workers if worker.process.exitcode is not None]
        worker = min(ended or [first], key=lambda worker: (worker.lost_peer(), worker.rank))
        return f"rank {worker.rank} of {len(self._workers)} {worker.end()}"

    def close(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        self._logs.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Worker:
    rank: int
    process: BaseProcess
    pipe: Connection
    log: Path

    def _last_lines(self) -> list[str]:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return [line for line in lines if line.strip()][-LAST_LINES:]

    def lost_peer(self) -> bool:
        """Return True if it seems to have died because another rank did."""
        code = self.process.exitcode
        return (
            code is not None and code >= 0 and bool(_LOST_PEER.search("".join(self._last_lines())))
        )

    def end(self) -> str:
        """Return how it ended, and its last lines."""
        lines = self._last_lines()
        return f"{death(self.process.exitcode)}; its last lines:\n" + "\n".join(
            f"    {line}" for line in lines or ["(none)"]
        )


def _start(rank: int, log: Path, function: Callable[..., Any], args: Any) -> _Worker:
    context = mp.get_context("spawn")
    pipe, far_end = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(far_end, log, function, args), daemon=True)
    # Python starts its tracker with the first process, and unblocks Ctrl-C when it has.
    resource_tracker.ensure_running()
    with interrupts_held():
        process.start()
    far_end.close()
    return _Worker(rank, process, pipe, log)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the block. Processes started in it inherit the blocked
    signal, so that it does not interrupt an interpreter that is still starting; this process, which
    ends them, is interrupted when they have all that they are started with."""
    in_main = threading.current_thread() is threading.main_thread()
    held: list[int] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # Another thread may receive it, and Python's handler runs in the main thread all the same.
    handler = (
        signal.signal(signal.SIGINT, lambda number, _: held.append(number)) if in_main else None
    )
    try:
        yield
    finally:
        if in_main:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if held:
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables while the block runs; processes started in it keep them."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank on one machine, with a store at ``port``
    of another process."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _work(pipe: Connection, log: Path, function: Callable[..., Any], args: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.stdout.flush()
    sys.stderr.flush()
    with open(log, "w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    status = 0
    try:
        for result in function(*args):
            pipe.send_bytes(pickle.dumps(result))
    except BaseException:  # for any error, the process ends below, by os._exit
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads can abort an interpreter during finalisation.
    os._exit(status)


def _end_with_parent() -> None:
    parent = mp.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
