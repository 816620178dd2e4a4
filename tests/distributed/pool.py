"""Worker processes that stay alive over a test session and run functions on several ranks.

Importing torch and DeepSpeed takes seconds, so one process does it (:mod:`stem`), workers are
forked from it, and tests share them. A test gives the
fixture ``pool`` a function of its own module, which runs on the first ``size`` workers:

    from pool import tensor_group

    def total(addend: int) -> float:
        group = tensor_group()
        x = torch.tensor(float(group.rank + addend))
        dist.all_reduce(x, group=group.handle)
        return float(x)

    def test_total(pool):
        assert pool.run(2, total, 10) == [21.0, 21.0]

A job finds the environment that torchrun gives its workers (RANK, WORLD_SIZE, MASTER_ADDR, ...), so
``init_process_group("gloo")`` and ``megatron.engine.environment.distributed`` work in it as they
are, once per job: a test that starts twice runs two jobs. Groups that are left open are closed when
all ranks are done. The function is found by its file and
name; arguments and results are pickled, and classes of the test's module may be among them.

An exception on any rank, a death or a hang fails the test with that rank's traceback; the workers
are then replaced. What is expected to raise is caught inside the function (``pytest.raises``).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib.util
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from stem import SETTINGS, shared

from megatron.apps.parity.ranks import rank_environment
from megatron.parallel.mesh import Group

GRACE_SECONDS = 1.0
"""How long the other ranks have to report after one failed."""

STACK_SECONDS = 10.0
"""How long a rank has to say where it is."""

MOST_THREADS = 12
"""Of a worker that is used again. DeepSpeed's stage 3 never lets go of its engines, nor so of
their groups, whose three threads each wake up all the time; a new worker costs less."""

_DONE = b"done"
_LINEAR = F.linear


class RankError(Exception):
    """A job failed; the message holds the tracebacks of the ranks."""


class Pool:
    """Worker processes on this machine, started when they are first needed.

    Args:
        timeout: seconds after which a job is taken to hang, where ``run`` does not say.
    """

    def __init__(self, timeout: float = 120.0) -> None:
        self._timeout = timeout
        self._workers: list[_Worker] = []

    def run(
        self, size: int, function: Callable[..., Any], *args: Any, timeout: float | None = None
    ) -> list[Any]:
        """Calls ``function(*args)`` on ``size`` ranks; returns what each rank returned.

        Raises:
            RankError: a rank raised, died or did not finish within ``timeout`` seconds.
        """
        seconds = timeout or self._timeout
        self._replace_the_crowded()
        while len(self._workers) < size:
            self._workers.append(_Worker())
        workers = self._workers[:size]
        # A store of its own for every job: no port is free at one moment and taken at the next,
        # and no job finds keys that another left.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        try:
            for rank, worker in enumerate(workers):
                worker.send(_Job(function, args, rank_environment(rank, size, store.port)))
        except OSError:  # one has died since its last job: this test says so, and no other
            self.close()
            raise
        replies = _collect(workers, seconds)
        if all(reply is not None and reply.error is None for reply in replies):
            for worker in workers:
                worker.pipe.send_bytes(_DONE)
            return [reply.value for reply in replies]
        reports = [
            f"--- rank {rank} of {size}: {_describe(worker, reply, seconds)}"
            for rank, (worker, reply) in enumerate(zip(workers, replies, strict=True))
        ]
        for worker in workers:
            worker.close()
            self._workers.remove(worker)
        raise RankError(f"{function.__name__} failed\n" + "\n".join(reports))

    def _replace_the_crowded(self) -> None:
        for worker in [each for each in self._workers if each.threads() > MOST_THREADS]:
            worker.close()
            self._workers.remove(worker)

    def close(self) -> None:
        """Ends all workers."""
        for worker in self._workers:
            worker.close()
        self._workers.clear()


def _collect(workers: list[_Worker], seconds: float) -> list[_Reply | None]:
    """The reply of each worker; None from those that gave none in time."""
    replies: list[_Reply | None] = [None] * len(workers)
    deadline = time.monotonic() + seconds
    pending = {worker.pipe: rank for rank, worker in enumerate(workers)}
    while pending:
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = pending.pop(pipe)  # type: ignore[arg-type]
            with contextlib.suppress(EOFError, ConnectionResetError):
                replies[rank] = pickle.loads(workers[rank].pipe.recv_bytes())
            reply = replies[rank]
            if reply is None or reply.error is not None:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return replies


def _describe(worker: _Worker, reply: _Reply | None, seconds: float) -> str:
    if reply is None:
        return worker.post_mortem(seconds)
    return "finished" if reply.error is None else f"raised\n{reply.error}"


@dataclass(frozen=True)
class _Reply:
    value: Any = None
    error: str | None = None


class _Job:
    """A function call in transit. The arguments stay bytes until the function's module, whose
    classes may be among them, is loaded."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], environment: dict[str, str]
    ) -> None:
        self.file = function.__code__.co_filename
        self.module, self.name = function.__module__, function.__qualname__
        assert "<" not in self.name, f"{self.name}: a worker finds functions of a module only"
        self.args, self.environment = pickle.dumps(args), environment

    def call(self) -> Any:
        os.environ.update(self.environment)
        function = getattr(_load(self.module, self.file), self.name)
        return function(*pickle.loads(self.args))


def _load(module: str, file: str) -> Any:
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, file)
        assert spec is not None and spec.loader is not None
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    return sys.modules[module]


class _Worker:
    """One process, seen from the test session."""

    def __init__(self) -> None:
        handle, name = tempfile.mkstemp(prefix="worker-stack-")
        os.close(handle)
        self.stack = Path(name)
        path = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
        environment = os.environ | SETTINGS | {"PYTHONPATH": path}
        self.process = shared().start("pool", "serve", name, environment=environment)
        self.pipe = self.process.pipe

    def send(self, job: _Job) -> None:
        self.pipe.send_bytes(pickle.dumps(job))

    def threads(self) -> int:
        """Number of its threads; none when it has died."""
        try:
            return psutil.Process(self.process.pid).num_threads()
        except psutil.NoSuchProcess:
            return 0

    def post_mortem(self, seconds: float) -> str:
        """Where a worker that does not reply is, or how it died."""
        self.process.join(0.1)
        if self.process.exitcode is not None:
            return f"died with exit code {self.process.exitcode}"
        os.kill(self.process.pid, signal.SIGUSR2)
        deadline, stack = time.monotonic() + STACK_SECONDS, ""
        while time.monotonic() < deadline:
            before, stack = stack, self.stack.read_text()
            if stack and stack == before:  # it has said all
                break
            time.sleep(0.1)
        stack = stack or "it does not say where"
        return f"still running (the limit is {seconds:g} s), at\n{stack}"

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()
        self.stack.unlink(missing_ok=True)


def serve(pipe: Connection, stack: str) -> None:
    """The life of a worker: calls what comes through the pipe until its other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(stack, "w") as file:
        faulthandler.register(signal.SIGUSR2, file=file)
        with contextlib.suppress(EOFError):
            while True:
                _serve_one(pipe)


def _serve_one(pipe: Connection) -> None:
    job = pickle.loads(pipe.recv_bytes())
    before, folder = dict(os.environ), os.getcwd()
    try:
        reply = pickle.dumps(_Reply(job.call()))
    except BaseException:  # SystemExit and pytest's outcomes too must not end the worker
        reply = pickle.dumps(_Reply(error=traceback.format_exc()))
    pipe.send_bytes(reply)
    # A rank that closes its groups while another still connects to it makes that one fail.
    assert pipe.recv_bytes() == _DONE
    os.environ.clear()
    os.environ.update(before)
    os.chdir(folder)
    _reset()


def _reset() -> None:
    """Forgets what a job left in torch's and DeepSpeed's globals."""
    if "deepspeed.comm.comm" in sys.modules:
        # Its backend outlives torch's groups, and so do the groups it keeps by name.
        sys.modules["deepspeed.comm.comm"].cdb = None
        groups = sys.modules["deepspeed.utils.groups"]
        groups._release_process_group_references()
        groups.mpu = None
    if "deepspeed.runtime.zero.parameter_offload" in sys.modules:
        # ZeRO 3 leaves its own F.linear, whose gradients come in another order: ranks that still
        # have it would reduce them with another parameter's of ranks that never had. And it
        # compares these running numbers between ranks, which may have done different jobs.
        F.linear = _LINEAR
        offload = sys.modules["deepspeed.runtime.zero.parameter_offload"]
        (count,) = offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
        count[0] = 0
        sys.modules["deepspeed.runtime.zero.partition_parameters"].Init.param_id = 0
        # Set for good by the first run with autocast; ZeRO then reduces in other formats.
        sys.modules["deepspeed.runtime.torch_autocast"].TORCH_AUTOCAST_INITIALIZED = False
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    gc.collect()


def tensor_group() -> Group:
    """All ranks of the job as one group; for tests of tensor-parallel code."""
    dist.init_process_group("gloo")
    return Group(tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)
