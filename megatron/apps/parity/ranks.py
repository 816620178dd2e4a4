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

GRACE_SECONDS = 3.0  # time to wait for other ranks after one has ended, to find which failed first
LAST_LINES = 10
_LOST_PEER = re.compile(r"gloo|Connection (closed|reset)|Broken pipe|DistNetworkError")


class RankError(RuntimeError):
    """Raised if a rank's process died. Contains the rank, exit status and last lines of output."""


class Ranks:
    """Processes that run a generator function and return the values that it yields. Each is a new
    interpreter on this machine's CPU, which imports the main module. The processes end with the
    context or with the process that started them. Their output is kept for :class:`RankError`."""

    def __init__(self, size: int, function: Callable[..., Iterable[Any]], *args: Any) -> None:
        self._logs = tempfile.TemporaryDirectory(prefix="ranks-")
        # The store listens before any rank starts, so that no other program can take its port.
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
        except BaseException:  # including an interrupt, which must leave no processes behind
            self.close()
            raise

    def results(self) -> list[Any]:
        """Return each rank's next value, in rank order. Raises RankError if a process has ended."""
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
        """Describe the rank that failed first. Ranks that ended only because another rank had gone
        are chosen last."""
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
        """Return whether this rank seems to have died because another rank did."""
        code = self.process.exitcode
        return (
            code is not None and code >= 0 and bool(_LOST_PEER.search("".join(self._last_lines())))
        )

    def end(self) -> str:
        """Return how the process ended, with its last lines of output, for a message."""
        lines = self._last_lines()
        return f"{death(self.process.exitcode)}; its last lines:\n" + "\n".join(
            f"    {line}" for line in lines or ["(none)"]
        )


def _start(rank: int, log: Path, function: Callable[..., Any], args: Any) -> _Worker:
    context = mp.get_context("spawn")
    pipe, far_end = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(far_end, log, function, args), daemon=True)
    # Start Python's resource tracker before SIGINT is blocked: starting it would unblock SIGINT.
    resource_tracker.ensure_running()
    with interrupts_held():
        process.start()
    far_end.close()
    return _Worker(rank, process, pipe, log)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block. Processes started in the block inherit the blocked
    signal, so that it does not interrupt a starting interpreter. This process, which ends them, is
    interrupted after they have received all their arguments."""
    in_main = threading.current_thread() is threading.main_thread()
    held: list[int] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # Another thread may receive the signal, but Python always runs its handler in the main thread.
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
    """Set environment variables in this context. Processes started in it keep the values."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return torchrun's environment variables for a rank on one machine whose store is on
    ``port``."""
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
    except BaseException:  # any error; the process ends below
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip Python's finalisation, during which gloo's threads can abort the process.
    os._exit(status)


def _end_with_parent() -> None:
    parent = mp.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
