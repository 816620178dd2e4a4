"""A process that has imported all that trainings need, and from which others are forked.

    process = shared().start("module", "function", "argument", environment=os.environ)
    process.pipe.recv()

runs ``module.function(pipe, "argument")`` in a process that starts in a fraction of a second
instead of several. All tests of a session ask the same stem, which imports when it is first asked;
it ends with the process that has started it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

HELPERS = Path(__file__).parent
TESTS = HELPERS.parent
ROOT = TESTS.parent
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
}
"""Variables that packages read when they are imported."""

MODULES = (
    "preloaded",
    "pytest",
    "transformers.models.llama.modeling_llama",
    "megatron.apps.parity.runs",
    "megatron.apps.parity.gradients",
)
SELDOM = (10_000, 20, 20)
"""When the garbage collector looks: tests make objects by the thousand, and few circles."""
PATIENCE = 10.0
"""Seconds within which a process that was killed has ended."""


@dataclass(frozen=True)
class _Job:
    module: str
    function: str
    arguments: tuple[Any, ...]
    environment: dict[str, str]
    folder: str


class Forked:
    """A process that was forked from a stem.

    Attributes:
        pid: its process id.
        pipe: the other end of the connection that its function has.
    """

    def __init__(self, stem: Stem, pipe: Connection) -> None:
        self._stem, self.pipe = stem, pipe
        self._number: int
        self.pid: int
        self._number, self.pid = pipe.recv()

    @property
    def exitcode(self) -> int | None:
        """Its exit status, negative if a signal ended it; None while it runs."""
        return self._asked(kill=False)

    def _asked(self, kill: bool) -> int | None:
        with contextlib.closing(self._stem.connect()) as pipe:
            pipe.send((self._number, kill))
            return pipe.recv()

    def join(self, seconds: float = PATIENCE) -> None:
        """Return when it has ended, or after some seconds."""
        deadline = time.monotonic() + seconds
        while self.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.01)

    def kill(self) -> None:
        """Send SIGKILL, if it still runs: the stem knows, and its process id may be another's."""
        self._asked(kill=True)


class Stem:
    """The process that forks.

    Args:
        root: the checkout whose modules it imports.
        modules: what it imports before it forks.
    """

    def __init__(self, root: Path = ROOT, modules: Sequence[str] = MODULES) -> None:
        self._root = root
        self._address = os.path.join(tempfile.mkdtemp(prefix="stem-"), "socket")
        environment = os.environ | SETTINGS
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            environment.pop(name, None)
        # It ends when nothing has the other end of its input.
        self._process = subprocess.Popen(
            [sys.executable, __file__, self._address, *modules],
            cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def connect(self) -> Connection:
        """Return a connection to the process that forks."""
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(self._address)
            return Connection(client.detach())

    def start(
        self, module: str, function: str, *arguments: Any, environment: Mapping[str, str]
    ) -> Forked:
        """Call a function in a process of its own; its module is found by ``PYTHONPATH`` too.

        Args:
            arguments: what the function gets after its end of the pipe.
            environment: the variables of the process.
        """
        pipe = self.connect()
        pipe.send(_Job(module, function, arguments, dict(environment), str(self._root)))
        return Forked(self, pipe)

    def stop(self) -> None:
        """End it, where no other process of the session needs it."""
        self._process.terminate()  # what a test has left behind may have its input open
        self._process.wait()
        shutil.rmtree(Path(self._address).parent, ignore_errors=True)


@functools.cache
def shared() -> Stem:
    """Return the stem of the session; started before tests are forked, it is that of all."""
    return Stem()


def _serve(address: str, modules: Sequence[str]) -> None:
    """Fork until the input ends."""
    sys.path[:0] = [str(Path.cwd()), str(HELPERS), str(TESTS)]
    running, statuses = dict[int, int](), dict[int, int]()
    imported, count = False, 0
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        print("ready", flush=True)
        os.dup2(2, 1)  # that pipe is read no more, and would fill up
        signal.signal(signal.SIGCHLD, lambda number, frame: _note_ends(running, statuses))
        while sys.stdin not in (ready := select.select([listening, sys.stdin], [], [])[0]):
            assert ready
            client, _ = listening.accept()
            pipe = Connection(client.detach())
            request = pipe.recv()
            # No process is forgotten, and its id free for another, within this.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
            if isinstance(request, tuple):
                asked, kill = request
                pids = [pid for pid, number in running.items() if number == asked]
                if kill and pids:
                    os.kill(pids[0], signal.SIGKILL)
                pipe.send(statuses.get(asked))
            else:
                imported = imported or _import(modules)
                if (child := os.fork()) == 0:
                    listening.close()
                    _run(request, pipe)
                count += 1
                running[child] = count
                pipe.send((count, child))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            pipe.close()


def _import(modules: Sequence[str]) -> bool:
    for name in modules:
        import_module(name)
    import_module("torch").set_num_threads(1)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"
    gc.freeze()  # what is imported is not looked through in the forks
    gc.set_threshold(*SELDOM)
    return True


def _run(job: _Job, pipe: Connection) -> NoReturn:
    """The forked process: never comes back."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(job.environment)
        os.chdir(job.folder)
        sys.path[:0] = filter(None, job.environment.get("PYTHONPATH", "").split(os.pathsep))
        getattr(import_module(job.module), job.function)(pipe, *job.arguments)
        status = 0
    except BaseException:  # an exit too ends this process below, by os._exit
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _note_ends(running: dict[int, int], statuses: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):  # no process is left
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if (number := running.pop(ended[0], None)) is not None:  # not one of an import
                statuses[number] = os.waitstatus_to_exitcode(ended[1])


if __name__ == "__main__":
    try:
        _serve(sys.argv[1], sys.argv[2:])
    finally:
        shutil.rmtree(Path(sys.argv[1]).parent)
