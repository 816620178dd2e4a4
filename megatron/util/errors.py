"""Errors as users see them. This file decides which exceptions are reported without a traceback,
and turns low-level failures (Rust panics, SIGBUS, closed output, Ctrl-C) into short messages. It
also replaces script paths in messages by installed commands (``megatron-plan``)."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

RESTART_STATUS = 3
"""Exit status of a run that ends because of a hang, a lost rank or a machine with wrong results.
The run can be restarted unchanged, unlike after status 2, which reports a mistake of the user."""

READER_GONE = 141
"""Exit status of a program whose output pipe was closed by its reader: 128 + SIGPIPE, the status
that shells report for a process killed by this signal."""

_PANIC = "PanicException"
_PAUSE = 60.0
_LAUNCHED = re.compile(
    r"(?<![-\w])(?P<launcher>deepspeed|torchrun)"
    r"(?P<flags>(?: +--?[\w-]+(?:[= ](?:'[^']*'|(?!\w+\.py)[^\s-]\S*))?){0,40})"
    r" +(?P<module>\w+)\.py\b"
)
_OWN_ERROR = re.compile(r"^\w+\.py(?=: )", re.MULTILINE)
"""Pattern for the script name (``plan.py``) at the start of a program's own error messages."""
_MODULE_FLAG = {"deepspeed": "--module", "torchrun": "-m"}
_FOLDERS = "tools", "tasks"
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_LONG_WORD = re.compile(r"(\S{500})\S{500,}(\S{100})")
_LONG = re.compile(r"(?s)(.{6000}).{2000,}(.{1000})")


class FaultError(RuntimeError):
    """Failure of a machine, process or network that ends the run. The message is meant for users
    and says what failed. The process exits with :data:`RESTART_STATUS`."""


def is_for_users(error: BaseException) -> bool:
    """Return whether an error is meant for users: an OSError, or a ValueError from this project."""
    if not isinstance(error, ValueError):
        return isinstance(error, OSError)
    root = Path(__file__).resolve().parents[2]
    last = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
    own = ("megatron", "examples_deepspeed", *_FOLDERS)
    return any(last.is_relative_to(root / name) for name in own)


def one_line(message: object) -> str:
    """Return an error or message as a single line. Control characters and other unprintable
    characters are escaped. Very long values, for example from another user's file, are shortened to
    their beginning and end."""
    text = " ".join(line.strip() for line in str(message).splitlines())
    text = _LONG.sub(_ends, _LONG_WORD.sub(_ends, text))
    return _CONTROL.sub(
        lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text
    )


class RareLog:
    """Logger that writes at most one line of each kind per minute and drops the others."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._last: dict[str, float] = {}

    def say(self, kind: str, line: str) -> None:
        now = time.monotonic()
        if now - self._last.get(kind, -_PAUSE) >= _PAUSE:
            self._last[kind] = now
            self._log(line)


def _ends(found: re.Match[str]) -> str:
    left_out = len(found[0]) - len(found[1]) - len(found[2])
    return f"{found[1]}[... {left_out:,} characters ...]{found[2]}"


def in_checkout() -> bool:
    """Return whether this package runs from a checkout, possibly through an editable install."""
    return (Path(__file__).resolve().parents[2] / "tools" / "plan.py").is_file()


def spelled(text: str) -> str:
    """Return the text with script paths replaced by installed commands. In a checkout, the text is
    returned unchanged."""
    return text if in_checkout() else as_commands(text)


@cache
def commands() -> dict[str, str]:
    """Return the names of the installed commands, keyed by the script's path in a checkout."""
    from importlib.metadata import entry_points  # the import takes 20 ms, and runs do not need it

    scripts = entry_points(group="console_scripts")
    return {
        path_of(script.module): script.name
        for script in scripts
        if script.name.startswith("megatron-") and script.attr == "main"
    }


def path_of(module: str) -> str:
    """Return the path in a checkout of the script that is installed as ``module``. For example,
    ``megatron.tools.plan`` is ``tools/plan.py``."""
    parts = module.split(".")
    if parts[0] == "megatron" and parts[1:2] and parts[1] in _FOLDERS:
        parts = parts[1:]
    return "/".join(parts) + ".py"


def as_commands(text: str, names: dict[str, str] | None = None) -> str:
    """Return a text with the paths of scripts replaced by the commands that start them.

    Args:
        text: a message or a help text.
        names: command names by script path. None means all installed commands.
    """
    if names is None:
        names = commands()

    def launched(match: re.Match[str]) -> str:
        if f"{match['module']}.py" not in names:
            return match[0]
        launcher, flags = match["launcher"], match["flags"]
        return f"{launcher}{flags} {_MODULE_FLAG[launcher]} {match['module']}"

    text = _LAUNCHED.sub(launched, text)
    text = _OWN_ERROR.sub(lambda match: _by_name(names).get(match[0], match[0]), text)
    if not names:
        return text
    paths = "|".join(re.escape(path) for path in sorted(names, key=len, reverse=True))
    program = rf"(?<![\w/.-])(?:python3? )?({paths})\b"
    return re.sub(program, lambda match: names[match[1]], text)


def _by_name(names: dict[str, str]) -> dict[str, str]:
    return {path.rpartition("/")[2]: name for path, name in names.items()}


class ProgramOutput:
    """Standard stream that reports its own name when it cannot be written. By default, the program
    exits silently if the stream's reader is gone, and any other failure raises an OSError with the
    stream's name. After :func:`outlive_output`, text that cannot be written is dropped instead, and
    the other stream gets one warning."""

    def __init__(
        self, stream: TextIO, name: str, spelled: Callable[[str], str] = lambda text: text
    ) -> None:
        self._stream, self._name, self._spelled = stream, name, spelled
        self.outlived = False
        self.lost = ""
        """Reason why text was dropped. Empty if nothing was dropped."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write the text. Drop it if writing fails and the program outlives its output."""
        try:
            self._stream.write(self._spelled(text))
        except OSError as error:
            self._failed(error)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each string with :meth:`write`."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the buffer. Failures are handled as in :meth:`write`."""
        try:
            self._stream.flush()
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        gone = isinstance(error, BrokenPipeError)
        if gone:
            self._discard()
        if not self.outlived:
            if gone:
                sys.exit(READER_GONE)
            raise OSError(error.errno, error.strerror, self._name) from None
        if not self.lost:
            why = "its reader has ended" if gone else error.strerror
            self.lost = f"{self._name} could not be written ({why})"
            other = sys.stderr if sys.stdout is self else sys.stdout
            other.write(f"warning: {self.lost}; the program continues without it\n")
            other.flush()

    def _discard(self) -> None:
        """Redirect buffered and later text to the null device: a broken pipe never recovers."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def name_output() -> None:
    """Wrap standard output and standard error in :class:`ProgramOutput`. Calling it again has no
    effect. A stream that was closed at start, which Python sets to None, discards its text."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if not isinstance(sys.stdout, ProgramOutput):
        sys.stdout = ProgramOutput(sys.stdout, "standard output")  # type: ignore[assignment]
    if not isinstance(sys.stderr, ProgramOutput):
        sys.stderr = ProgramOutput(sys.stderr, "standard error", spelled)  # type: ignore[assignment]


def outlive_output() -> None:
    """Let this program continue when its output cannot be written. For a training run, losing the
    log is better than losing the run."""
    name_output()
    for stream in (sys.stdout, sys.stderr):
        stream.outlived = True  # type: ignore[union-attr]


def lost_output() -> list[str]:
    """Return a sentence for each standard stream that dropped text."""
    return [lost for stream in (sys.stdout, sys.stderr) if (lost := getattr(stream, "lost", ""))]


def shorten_interrupts() -> None:
    """Make Ctrl-C end this program with one line instead of a traceback, even while libraries are
    still being imported. The process still ends with the exit status of SIGINT."""
    others = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            others(kind, error, trace)
            return
        if os.environ.get("RANK", "0") == "0":
            with suppress(OSError):
                print("interrupted", file=sys.stderr, flush=True)

    sys.excepthook = show


@contextmanager
def rust_errors(subject: str) -> Iterator[None]:
    """Turn errors that a Rust library raises for bad input into a ValueError. Its message begins
    with `subject`, the file or record. The library raises bare Exceptions, or panics, which PyO3
    derives from BaseException so that `except Exception` does not catch them."""
    try:
        yield
    except BaseException as error:  # panics derive only from BaseException
        if type(error) is not Exception and type(error).__name__ != _PANIC:
            raise
        reason = " ".join(str(error).split())[:300] or "it does not say why"
        raise ValueError(f"{subject}: {reason}") from None


def name_lost_pages() -> None:
    """End this process with a message when a page of a memory-mapped file cannot be read: the file
    was truncated, its disk failed, or shared memory is full. Only effective on 64-bit Linux."""
    if sys.platform != "linux" or sys.maxsize < 2**32:
        return
    action = _SignalAction(ctypes.cast(_on_lost_page, ctypes.c_void_p), flags=_SA_SIGINFO)
    ctypes.CDLL(None).sigaction(int(signal.SIGBUS), ctypes.byref(action), None)


class _SignalAction(ctypes.Structure):
    """Layout of ``struct sigaction`` on 64-bit Linux."""

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
    """Print the reason and exit. The faulting instruction itself raises the signal, so Python code
    can run here, but the handler cannot return to that instruction."""
    try:
        address = ctypes.c_void_p.from_address(info + _ADDRESS_IN_SIGINFO).value or 0
        sys.stdout.flush()
        message = f"error: {_lost_page(address)}\n"
    except BaseException:  # no exception may propagate into the interrupted instruction
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
    if os.path.basename(name)[0] == "#" and name.endswith(" (deleted)"):  # a nameless file
        return f"a file in {os.path.dirname(name)} cannot be used: its disk has failed or is full"
    size = os.stat(name).st_size if os.path.exists(name) else 0
    if int(fields[2], 16) + address - start < size:
        return f"{name} cannot be read: its disk or network failed"
    return (
        f"{name} was cut short or deleted while it was read, and has {size} bytes; restore it "
        "(delete it if it is in an index-cache), and resume from the last checkpoint"
    )
