"""Confined process with its descendants, which are started, monitored and killed as a unit.

The keeper forks a warden into new namespaces. The warden forks the first process of these
namespaces, which forks the target and reaps orphans. When the first process dies, the kernel kills
all processes of its namespace. Without namespaces, the keeper adopts orphans and kills them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from megatron.apps.reinforcement.rewards.confinement import Limits, confine, unshared

OUTPUT_BYTES = 1 << 20
"""Maximum number of bytes to keep of a process's output stream."""
_LOOK = 0.02
"""Seconds between checks of the limits on memory, processes and files."""
_LOOKS_PER_FOLDER = 10
_MOST_FILES = 4096
_SUBREAPER, _DEATH_SIGNAL = 36, 1
_PAGE = resource.getpagesize()
_LIBC = ctypes.CDLL(None, use_errno=True)
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH")
"""Environment variables that are passed on. Others may contain secrets."""


@dataclass
class Box:
    """Confined process.

    Attributes:
        folder: its temporary folder, the only one that it may write to. Removed when the box ends.
        pipes: file descriptors on this side, by the descriptor number in the target.
        output: beginning of each output stream, by descriptor number in the target.
        lengths: total number of bytes of each output stream.
        status: exit status of the target, negative for a signal; None while it runs.
        warden: process id of the warden.
    """

    limits: Limits
    folder: str
    namespaces: tuple[str, ...] = ()
    pipes: dict[int, int] = field(default_factory=dict)
    output: dict[int, bytearray] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    status: int | None = None
    warden: int = 0
    _first: int = 0
    _ended: int = -1
    _looks: int = 0

    @classmethod
    def start(cls, limits: Limits, target: Callable[[], None]) -> Box:
        """Fork a process that calls ``target``. It has pipes for its standard streams, and for
        descriptor 3, to which it writes its answer. It exits with status 0, or 1 if ``target``
        raised."""
        _LIBC.prctl(_SUBREAPER, 1, 0, 0, 0)
        box = cls(limits, tempfile.mkdtemp(prefix="megatron-reward-"))
        os.chmod(box.folder, 0o700)
        theirs = {}
        for number in range(4):
            read, write = os.pipe()
            theirs[number], box.pipes[number] = (read, write) if number == 0 else (write, read)
            os.set_blocking(box.pipes[number], False)
        report, tell = os.pipe()
        box.warden = os.fork()
        if not box.warden:
            try:
                os.close(report)
                for descriptor in box.pipes.values():
                    os.close(descriptor)
                box._run_warden(tell, theirs, target)
            finally:
                os._exit(70)
        os.close(tell)
        for descriptor in theirs.values():
            os.close(descriptor)
        box._ended = report
        words = _line(report).split()
        if len(words) < 1 or not words[0].isdecimal():
            box.end()
            raise OSError(f"a process for rewards cannot be started: {' '.join(words)}")
        box._first, box.namespaces = int(words[0]), tuple(words[1:])
        box.output = {number: bytearray() for number in (1, 2, 3)}
        box.lengths = dict.fromkeys(box.output, 0)
        return box

    def _run_warden(self, tell: int, theirs: dict[int, int], target: Callable[[], None]) -> None:
        _LIBC.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            self.namespaces = tuple(unshared(self.limits))
        except OSError as error:
            os.write(tell, f"{error}\n".encode())
            return
        first = os.fork()
        if first:
            os.write(tell, f"{first} {' '.join(self.namespaces)}\n".encode())
            for descriptor in (tell, *theirs.values()):
                os.close(descriptor)
            os.waitpid(first, 0)
            os._exit(0)
        _LIBC.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        _LIBC.prctl(_SUBREAPER, 1, 0, 0, 0)
        own = os.fork()
        if not own:
            os.close(tell)
            self._run(theirs, target)
        for descriptor in theirs.values():
            os.close(descriptor)
        ended, status = 0, 0
        while ended != own:
            ended, status = os.wait()
        with contextlib.suppress(OSError):
            os.write(tell, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        if "pid" not in self.namespaces:
            _kill_all(lambda: _descendants(os.getpid()))
        os._exit(0)

    def _run(self, theirs: dict[int, int], target: Callable[[], None]) -> None:
        """Run the target in this forked process. Never returns."""
        status = 1
        try:
            # Move descriptors above their final numbers first, so that dup2 closes none.
            high = {number: _above(descriptor) for number, descriptor in theirs.items()}
            for number, descriptor in high.items():
                os.dup2(descriptor, number)
            os.closerange(4, 4096)
            os.setsid()
            os.chdir(self.folder)
            os.nice(5)  # the keeper, which monitors the target, has priority
            kept = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
            os.environ.clear()
            os.environ |= kept | {"HOME": self.folder, "TMPDIR": self.folder}
            os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            tempfile.tempdir = None
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            confine(self.limits, self.folder, self.namespaces)
            target()
            status = 0
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else stop.code is not None
        except BaseException as error:
            with contextlib.suppress(BaseException):
                os.write(2, f"{type(error).__name__}: {str(error)[:1000]}\n".encode())
        finally:
            os._exit(int(status) & 255)

    def send(self, data: bytes) -> None:
        """Set the data for the target's standard input. :meth:`watch` writes it."""
        self._unsent = memoryview(data)

    _unsent: memoryview = field(default=memoryview(b""))

    def watch(self, until: float, done: Callable[[], bool]) -> str | None:
        """Let the target run until ``done`` returns True, the target ends, or a limit is exceeded.
        Return the name of the exceeded limit, or None. ``until`` is a time on the monotonic clock.
        Raises SystemExit if the trainer has been killed."""
        parent = os.getppid()
        while True:
            if done():
                return None
            if os.getppid() != parent:  # the trainer was killed
                raise SystemExit(1)
            if self.status is not None and not self._drain():
                return None
            now = time.monotonic()
            if now > until:
                return "time"
            if problem := self._look():
                return problem
            if self.lengths[1] > self.most_output or self.lengths[3] > 64 * OUTPUT_BYTES:
                return "output"
            reading = [self.pipes[n] for n in (1, 2, 3) if n in self.pipes]
            if self.status is None:
                reading.append(self._ended)
            writing = [self.pipes[0]] if self._unsent and 0 in self.pipes else []
            pause = min(_LOOK, max(0.0, until - now))
            ready, free, _ = select.select(reading, writing, [], pause)
            if free:
                self._write()
            if self._ended in ready:
                line = _line(self._ended)
                self.status = int(line) if line.lstrip("-").isdecimal() else -signal.SIGKILL
            self._drain()

    def close_input(self) -> None:
        """Close the target's standard input."""
        if 0 in self.pipes:
            os.close(self.pipes.pop(0))

    def _write(self) -> None:
        try:
            sent = os.write(self.pipes[0], self._unsent[: 1 << 16])
        except BlockingIOError:
            return
        except OSError:  # the target has closed its input
            self._unsent = memoryview(b"")
            self.close_input()
            return
        self._unsent = self._unsent[sent:]
        if not self._unsent and self.closes:
            self.close_input()

    closes: bool = False
    """True if the input is closed once all data is written."""
    most_output: int = OUTPUT_BYTES

    def _drain(self) -> bool:
        """Read the available output. Return whether there was any."""
        some = False
        for number in (1, 2, 3):
            for _ in range(16):
                if number not in self.pipes:
                    break
                try:
                    part = os.read(self.pipes[number], 1 << 16)
                except BlockingIOError:
                    break
                if not part:
                    os.close(self.pipes.pop(number))
                    break
                some = True
                self.lengths[number] += len(part)
                space = (OUTPUT_BYTES if number < 3 else 64 * OUTPUT_BYTES) - len(
                    self.output[number]
                )
                self.output[number] += part[: max(0, space)]
        return some

    def _look(self) -> str | None:
        """Return the name of the limit that the box's processes, memory or files exceed, or
        None."""
        processes = self.processes()
        threads = resident = 0
        for process in processes:
            with contextlib.suppress(OSError, ValueError, IndexError):
                threads += len(os.listdir(f"/proc/{process}/task"))
                with open(f"/proc/{process}/statm") as file:
                    fields = file.read().split()
                shared = int(fields[2]) * _PAGE if len(processes) > 1 else 0
                resident += int(fields[1]) * _PAGE - shared
        if threads > self.limits.processes and "processes" not in self.limits.allowed:
            return "processes"
        if resident > self.limits.memory:
            return "memory"
        self._looks += 1
        if self._looks % _LOOKS_PER_FOLDER == 0 and not self._folder_fits():
            return "files"
        return None

    def processes(self) -> list[int]:
        """Return the ids of the target and its descendants."""
        return _descendants(self._first)

    def _folder_fits(self) -> bool:
        size = 0
        for count, entry in enumerate(_entries(self.folder), 1):
            with contextlib.suppress(OSError):
                size += entry.stat(follow_symlinks=False).st_blocks * 512
            if count > _MOST_FILES or size > 4 * self.limits.file_bytes:
                return False
        return True

    def end(self) -> None:
        """Kill all processes, close the pipes and remove the folder."""
        if self._first:
            if "pid" not in self.namespaces:
                _kill_all(self.processes)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._first, signal.SIGKILL)
        elif self.warden:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.warden, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.warden, 0)
        for descriptor in (*self.pipes.values(), self._ended):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self.pipes.clear()
        remove(self.folder)


def sweep(boxes: set[int]) -> None:
    """Kill orphaned processes that belong to none of the boxes with these wardens."""
    _kill_all(
        lambda: [
            process
            for child in _children(os.getpid())
            if child not in boxes
            for process in (child, *_descendants(child))
        ]
    )


def remove(folder: str) -> None:
    """Remove a folder regardless of its contents, depth and permissions. The contents of subfolders
    are moved to the top before the subfolders are removed, so that no path becomes too long."""
    moved = 0
    for _ in range(1 << 16):
        with contextlib.suppress(OSError):
            os.rmdir(folder)
        if not os.path.lexists(folder):
            return
        for entry in list(os.scandir(folder)):
            with contextlib.suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)
                for inner in list(os.scandir(entry.path)):
                    moved += 1
                    if inner.is_dir(follow_symlinks=False):
                        os.chmod(inner.path, 0o700)
                    with contextlib.suppress(OSError):
                        os.rename(inner.path, os.path.join(folder, f"removed-{moved}"))
                os.rmdir(entry.path)


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    folders = [folder]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)


def _above(descriptor: int) -> int:
    import fcntl

    return fcntl.fcntl(descriptor, fcntl.F_DUPFD, 64)


def _line(descriptor: int) -> str:
    """Read a short line from a pipe. Return an empty string at the end of the pipe."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(descriptor, 1)
        if not part:
            break
        line += part
    return line.decode("ascii", "replace").strip()


def _children(process: int) -> list[int]:
    processes: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{process}/task/{task}/children") as f:
                processes += map(int, f.read().split())
    return processes


def _descendants(process: int) -> list[int]:
    processes: list[int] = []
    queue = _children(process)
    while queue:
        child = queue.pop()
        processes.append(child)
        queue += _children(child)
    return processes


def _kill_all(processes: Callable[[], list[int]]) -> None:
    """Kill processes until none is left. Each is stopped first, so that it cannot start others."""
    for _ in range(100):
        alive = [process for process in processes() if _state(process) not in ("Z", "")]
        if not alive:
            break
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)
        _reap()
        time.sleep(0.001)
    _reap()


def _reap() -> None:
    """Reap orphans that have ended. Each box waits for its own warden."""
    for child in _children(os.getpid()):
        if _state(child) == "Z":
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG)


def _state(process: int) -> str:
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{process}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
    return ""
