"""Programs that start at once: from a process that has imported everything already.

    runs = WarmRuns("pretrain_gpt")
    processes = runs.start(["--num-layers", "2"], 2, folder / "output")

A process imports modules, the first of which is the program, and waits for jobs. For each it forks
a process that is the program with these flags, and tells its id, which is also that of its process
group. When it has ended, its exit status is in ``output.status``, negative if a signal ended it. A
run starts in a third of a second instead of several.
"""

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from stem import ROOT, SETTINGS, Stem, shared

PATIENCE = 180.0
"""Seconds within which anything that is waited for must happen."""


class WarmRuns:
    """The process that forks, of a program and other modules that it needs, all in ``root``."""

    def __init__(self, program: str, *modules: str, root: Path = ROOT):
        environment = os.environ | SETTINGS
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            environment.pop(name, None)
        self._own = None if root == ROOT else Stem(root, ("preloaded",))
        self._process = (self._own or shared()).start(
            "warm_runs", "serve", program, *modules, environment=environment
        )

    def start(
        self,
        argv: Sequence[object],
        size: int,
        output: Path,
        variables: Callable[[int], Mapping[str, object]] = lambda rank: {},
        **environment: object,
    ) -> list[int]:
        """Starts the processes of one run; their ids. ``environment`` has further variables
        of all ranks, and ``variables`` those of each."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        of_all = {"WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        processes = []
        for rank in range(size):
            own = {**of_all, **environment, "RANK": rank, "LOCAL_RANK": rank, **variables(rank)}
            processes.append(self.fork(argv, own, output_of(output, rank)))
        return processes

    def fork(self, argv: Sequence[object], variables: Mapping[str, object], output: Path) -> int:
        """Start one process; returns its id."""
        job = {
            "argv": list(map(str, argv)),
            "environment": {name: str(value) for name, value in variables.items()},
            "output": str(output),
        }
        self._process.pipe.send(job)
        return self._process.pipe.recv()

    def stop(self) -> None:
        """Ends the process that forks."""
        self._process.pipe.close()
        self._process.join()
        if self._own is not None:
            self._own.stop()


def output_of(output: Path, rank: int) -> Path:
    """The file of what a rank prints."""
    return output if rank == 0 else output.with_name(f"{output.name}.{rank}")


def status_of(output: Path, rank: int) -> int | None:
    """How a rank has ended: its exit status, or a signal's number, negative; None while it runs."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return int(Path(f"{output_of(output, rank)}.status").read_text())
    return None


def alive(processes: Sequence[int]) -> bool:
    """Whether any of these processes runs."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, 0)
            return True
    return False


def kill(processes: Sequence[int]) -> None:
    """SIGKILL to the processes and those that they started; returns when they have ended."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # just forked, not yet a group
            os.kill(process, signal.SIGKILL)
    wait(processes, lambda: not alive(processes))


def wait(processes: Sequence[int], condition: Callable[[], bool], pause: float = 0.0005) -> bool:
    """Until something is so, or the run has ended; whether it is so."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if not alive(processes):
            return condition()
        assert time.monotonic() < deadline, "nothing happens"
        time.sleep(pause)
    return True


def _run(main: Callable[[], None], program: str, job: dict) -> NoReturn:
    """The forked process: never comes back."""
    os.setsid()
    output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.update(job["environment"])
    sys.argv = [f"{program}.py", *job["argv"]]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    try:
        main()
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(70)


def serve(pipe: Connection, program: str, *modules: str) -> None:
    """Fork the runs that are asked for, until the pipe ends."""
    for module in (*modules, program):
        import_module(module)
    outputs = dict[int, str]()
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"
    signal.signal(signal.SIGCHLD, lambda number, frame: _note_ends(outputs))
    with contextlib.suppress(EOFError):
        while job := pipe.recv():
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # until its output is known
            child = os.fork()
            if child == 0:
                _run(import_module(program).main, program, job)
            outputs[child] = job["output"]
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            pipe.send(child)


def _note_ends(outputs: dict[int, str]) -> None:
    """Write the exit status of every process that has ended next to its output; until that is
    written the process is there for :func:`alive`. Another end waits, as this handles signals."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    with contextlib.suppress(ChildProcessError):  # no process is left
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            with contextlib.suppress(OSError):  # the folder of a test that is over
                Path(f"{outputs.pop(ended.si_pid)}.status").write_text(str(status))
            os.waitpid(ended.si_pid, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
