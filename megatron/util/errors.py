"""Errors as users see them: which are about their input, what libraries in Rust raise about it, the
signal of a mapped file that cannot be read, output that cannot be written, Ctrl-C, and the names of
programs: ``tools/plan.py`` of a checkout is the command ``megatron-plan`` without one."""

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
"""Exit status of a run that ends because of a hang, a lost rank or a machine that computes
wrongly: nothing has to be changed before it is started again. 2 is the user's mistake."""

READER_GONE = 141
"""Exit status of a program that ends because nothing reads its output: 128 + SIGPIPE, a shell's
status of a program that this signal kills."""

_PANIC = "PanicException"
_PAUSE = 60.0
_LAUNCHED = re.compile(
    r"(?<![-\w])(?P<launcher>deepspeed|torchrun)"
    r"(?P<flags>(?: +--?[\w-]+(?:[= ](?:'[^']*'|(?!\w+\.py)[^\s-]\S*))?){0,40})"
    r" +(?P<module>\w+)\.py\b"
)
_OWN_ERROR = re.compile(r"^\w+\.py(?=: )", re.MULTILINE)
"""A program that begins a line, as in its errors, names itself without its folder."""
_MODULE_FLAG = {"deepspeed": "--module", "torchrun": "-m"}
_FOLDERS = "tools", "tasks"
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_LONG_WORD = re.compile(r"(\S{500})\S{500,}(\S{100})")
_LONG = re.compile(r"(?s)(.{6000}).{2000,}(.{1000})")


class FaultError(RuntimeError):
    """A machine, process or network has failed, and the run with it; the message, for users, names
    it. The process ends with :data:`RESTART_STATUS`."""


def is_for_users(error: BaseException) -> bool:
    """True for errors about the user's input that this project raised, and for errors of files."""
    if not isinstance(error, ValueError):
        return isinstance(error, OSError)
    root = Path(__file__).resolve().parents[2]
    last = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
    own = ("megatron", "examples_deepspeed", *_FOLDERS)
    return any(last.is_relative_to(root / name) for name in own)


def one_line(message: object) -> str:
    """The text of an error or message in one line: its lines follow each other, what a terminal
    would obey or cannot show is escaped, and of a very long value, which a file of another user
    may have, are left its ends."""
    text = " ".join(line.strip() for line in str(message).splitlines())
    text = _LONG.sub(_ends, _LONG_WORD.sub(_ends, text))
    return _CONTROL.sub(
        lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text
    )


class RareLog:
    """Logs each kind of line at most once a minute."""

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
    """True if this package is run from a checkout, or is installed from one as editable."""
    return (Path(__file__).resolve().parents[2] / "tools" / "plan.py").is_file()


def spelled(text: str) -> str:
    """Return a text that names programs by their paths with the installed commands instead, if
    there is no checkout."""
    return text if in_checkout() else as_commands(text)


@cache
def commands() -> dict[str, str]:
    """The installed command of each program, by the program's path in a checkout."""
    from importlib.metadata import entry_points  # takes 20 ms, which no run needs

    scripts = entry_points(group="console_scripts")
    return {
        path_of(script.module): script.name
        for script in scripts
        if script.name.startswith("megatron-") and script.attr == "main"
    }


def path_of(module: str) -> str:
    """Return the path in a checkout of an installed program: of ``megatron.tools.plan`` it is
    ``tools/plan.py``."""
    parts = module.split(".")
    if parts[0] == "megatron" and parts[1:2] and parts[1] in _FOLDERS:
        parts = parts[1:]
    return "/".join(parts) + ".py"


def as_commands(text: str, names: dict[str, str] | None = None) -> str:
    """Return a text with the programs that it names as commands.

    Args:
        text: a message or a help text.
        names: commands by path; those that are installed, if None.
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
    """A standard stream that names itself where it cannot be written. At first a reader that is
    gone ends the program without a message, and any other failure is an OSError with the stream's
    name. After :func:`outlive_output` the text is dropped instead, and the other stream gets one
    line about it."""

    def __init__(
        self, stream: TextIO, name: str, spelled: Callable[[str], str] = lambda text: text
    ) -> None:
        self._stream, self._name, self._spelled = stream, name, spelled
        self.outlived = False
        self.lost = ""
        """Reason why text was dropped; empty if none was."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes text, or drops it."""
        try:
            self._stream.write(self._spelled(text))
        except OSError as error:
            self._failed(error)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Writes texts, as :meth:`write`."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Writes what is buffered, or drops it."""
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
        """Sends what follows, and what is buffered, to no reader: a pipe without one stays so."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def name_output() -> None:
    """Makes standard output and standard error of this program :class:`ProgramOutput`; a second
    call does nothing. Of a program that was started with one of them closed, Python has None."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if not isinstance(sys.stdout, ProgramOutput):
        sys.stdout = ProgramOutput(sys.stdout, "standard output")  # type: ignore[assignment]
    if not isinstance(sys.stderr, ProgramOutput):
        sys.stderr = ProgramOutput(sys.stderr, "standard error", spelled)  # type: ignore[assignment]


def outlive_output() -> None:
    """Makes this program continue where its output cannot be written: a training is worth more
    than its log."""
    name_output()
    for stream in (sys.stdout, sys.stderr):
        stream.outlived = True  # type: ignore[union-attr]


def lost_output() -> list[str]:
    """Sentences about the standard streams whose text was dropped, or a part of it."""
    return [lost for stream in (sys.stdout, sys.stderr) if (lost := getattr(stream, "lost", ""))]


def shorten_interrupts() -> None:
    """Makes Ctrl-C end this program with one line instead of a traceback, also while it imports
    its libraries. The exit status remains that of the signal."""
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
    """Within it, what a Rust library raises about its input is a ValueError that begins with
    `subject`, which names the file or record: a bare Exception, or a panic, which PyO3 derives from
    BaseException, so that no `except Exception` sees it."""
    try:
        yield
    except BaseException as error:  # panics derive from nothing else
        if type(error) is not Exception and type(error).__name__ != _PANIC:
            raise
        reason = " ".join(str(error).split())[:300] or "it does not say why"
        raise ValueError(f"{subject}: {reason}") from None


def name_lost_pages() -> None:
    """Make this process end with a message where a page of a mapped file is lost: it was cut short,
    its disk failed, or shared memory is full. Elsewhere than on Linux SIGBUS kills it silently."""
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
    except BaseException:  # nothing may be raised into the instruction that was interrupted
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
    if os.path.basename(name)[0] == "#" and name.endswith(" (deleted)"):  # it never had a name
        return f"a file in {os.path.dirname(name)} cannot be used: its disk has failed or is full"
    size = os.stat(name).st_size if os.path.exists(name) else 0
    if int(fields[2], 16) + address - start < size:
        return f"{name} cannot be read: its disk or network failed"
    return (
        f"{name} was cut short or deleted while it was read, and has {size} bytes; restore it "
        "(delete it if it is in an index-cache), and resume from the last checkpoint"
    )
