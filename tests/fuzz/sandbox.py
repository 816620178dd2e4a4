"""A process in which inputs are read: limited, watched, and started again when it dies."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fuzz.edits import Edit, apply, copy, files_of
from fuzz.fuzzer import ROOT, Finding, Fuzzer, judged
from fuzz.landlock import confine

WALL_SECONDS = 200.0
"""After which an input that waits is a hang: a few cores may have many fuzzers to run."""
_FILE_BYTES = 1 << 28
_SYSTEM = ("/proc/", "/sys/", "/dev/null", "/dev/urandom", "/usr/lib/", "/usr/share/zoneinfo")
_LIBRARIES = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
CONNECTS = frozenset(("socket.connect", "socket.getaddrinfo"))
_COMMANDS = frozenset(
    ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty")
    + ("subprocess.Popen", "pty.spawn", "os.startfile", "webbrowser.open", "os.kill")
    + ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto", "urllib.Request")
    + ("builtins.input",)
)
_CHANGES = frozenset(
    ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate")
    + ("os.chmod", "os.chown", "os.utime", "os.mkfifo", "os.mknod", "shutil.rmtree")
)


class Sandbox:
    """Reads edited copies of a fuzzer's input. A context manager."""

    def __init__(self, fuzzer: Fuzzer, scratch: Path) -> None:
        """``scratch`` is an empty folder for everything."""
        self.fuzzer, self._scratch = fuzzer, scratch.resolve()
        self._seed = self._scratch / "seed"
        self._seed.mkdir(parents=True)
        fuzzer.make(self._seed)
        self._log = self._scratch / "output"
        self._process: Any = None
        self.read = self.refused = 0

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def finding(self, edits: Sequence[Edit]) -> Finding | None:
        """What breaks the rule when the edited input is read."""
        if self._process is None:
            self._start()
        started = time.monotonic()
        self._pipe.send(tuple(edits))
        while not self._pipe.poll(0.5):
            if not self._process.is_alive():
                break
            if time.monotonic() - started > WALL_SECONDS:
                os.kill(self._process.pid, signal.SIGPROF)  # says where, and ends
                self._process.join(5)
                return self._dead(f"waits for more than {WALL_SECONDS:g} s")
        try:
            was_read, finding = self._pipe.recv()
        except EOFError:
            self._process.join(5)
            code = self._process.exitcode
            if code == -signal.SIGPROF:
                return self._dead(f"takes more than {self.fuzzer.seconds:g} s")
            return self._dead(f"ends the process ({code})")
        self.read += was_read
        self.refused += not was_read
        return finding

    def _dead(self, what: str) -> Finding:
        output = self._log.read_text(errors="replace") if self._log.exists() else ""
        self._stop()
        ours = [line for line in output.splitlines() if f'"{ROOT}/megatron' in line]
        place = ours[0].strip().removeprefix(f'File "{ROOT}/') if ours else ""
        return Finding(f"{what} {place}".strip(), output[-3000:])

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=self._serve, args=(theirs,), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads that forks do not have
            self._process.start()
        theirs.close()

    def _stop(self) -> None:
        if self._process is not None:
            self._pipe.close()
            self._process.kill()
            self._process.join()
            self._process = None

    def _serve(self, pipe: Any) -> None:
        """The process: one input after another, until the other end is closed."""
        self._pipe.close()
        target, temporary = self._scratch / "input", self._scratch / "temporary"
        temporary.mkdir(exist_ok=True)
        tempfile.tempdir = str(temporary)
        os.environ |= {"HF_HOME": str(temporary), "HOME": str(temporary)}
        os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        copy(self._seed, target)
        os.chdir(temporary)
        logging.disable(logging.CRITICAL)
        with contextlib.suppress(Exception):
            self.fuzzer.read(target)  # imports what it needs, before there are limits
        _limit(self.fuzzer, self._log, temporary)
        watch = _Watch((self._scratch,), self.fuzzer.may)
        readable = [Path(place) for place in (*watch.readable, "/proc", "/sys", *_LIBRARIES)]
        confine((self._scratch, Path("/dev")), readable, bool(CONNECTS & self.fuzzer.may))
        names = [path.name for path in files_of(self._seed)]
        while True:
            try:
                edits = pipe.recv()
            except EOFError:
                os._exit(0)
            copy(self._seed, target)
            apply(target, edits)
            if self.fuzzer.repair is not None and edits and edits[0].seed % 2:
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                    self.fuzzer.repair(target)
            os.truncate(self._log, 0)
            with watch, _CPU(self.fuzzer.seconds):
                outcome = judged(self.fuzzer, target, names)
            if watch.seen:
                what = watch.seen[0]
                outcome = (outcome[0], Finding(what, "\n".join([*watch.seen, repr(outcome[1])])))
            if os.lseek(0, 0, os.SEEK_CUR):
                sys.stdin.seek(0)
                outcome = (outcome[0], Finding("reads the standard input", repr(outcome[1])))
            pipe.send(outcome)


def _limit(fuzzer: Fuzzer, log: Path, folder: Path) -> None:
    """Standard streams are files, and the limits hold from here on."""
    answers = folder.parent / "answers"
    answers.write_bytes(b"y\n" * 4096)  # to whoever asks
    for path, flags, number in (
        (answers, os.O_RDONLY, 0),
        *((log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, n) for n in (1, 2)),
    ):
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False, errors="backslashreplace")
    sys.dont_write_bytecode = True
    faulthandler.enable(sys.stderr)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    faulthandler.register(signal.SIGPROF, sys.stderr, chain=True)  # where it was; then it ends
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + fuzzer.memory, used + fuzzer.memory))


class _CPU:
    """Ends the process after some seconds of CPU time in the block."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self._seconds)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)


class _Watch:
    """Notes and refuses what a reader must not do, while it is entered."""

    def __init__(self, folders: Sequence[Path], may: frozenset[str]) -> None:
        self._own = tuple(f"{folder}/" for folder in folders)
        programs = {ROOT, Path(sys.prefix), Path(sys.base_prefix), Path(os.__file__).parent}
        programs |= {Path(path).resolve() for path in sys.path if path}
        self.readable = (*self._own, *(f"{path}/" for path in programs), *_SYSTEM)
        self._may, self._active = may, False
        self.seen: list[str] = []
        sys.addaudithook(self._event)

    def __enter__(self) -> None:
        self.seen, self._active = [], True

    def __exit__(self, *_: object) -> None:
        self._active = False

    def _event(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._active or event in self._may:
            return
        if event in _COMMANDS:
            self._refuse(f"{event} {str(args)[:200]}")
        elif event == "open" and isinstance(args[0], str | bytes):
            flags = args[2] or 0
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            self._check(event, args[0], self._own if writes else self.readable)
        elif event in _CHANGES and isinstance(args[0], str | bytes):
            self._check(event, args[0], self._own)

    def _check(self, event: str, path: str | bytes, allowed: tuple[str, ...]) -> None:
        self._active = False  # what follows opens nothing, but links are looked up
        try:
            place = os.path.realpath(os.fsdecode(path))
        except ValueError:
            place = ""  # a null byte: the system refuses it
        finally:
            self._active = True
        if place and place != "/dev/null" and not f"{place}/".startswith(allowed):
            self._refuse(f"{event} of {place}")

    def _refuse(self, what: str) -> None:
        self.seen.append(what)
        raise PermissionError(13, "a reader must not do this", what)
