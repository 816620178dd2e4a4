"""Running processes and threads, their waits, and the machines that answer."""

from __future__ import annotations

import contextlib
import ctypes
import dis
import errno
import os
import platform
import socket
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType

from megatron.util.errors import one_line
from megatron.util.phases import activity, background_groups

_WORDS = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits for storage or a device (state D)",
    "T": "is stopped (state T: SIGSTOP, Ctrl-Z or a debugger)",
    "t": "is stopped by a debugger (state t)",
    "Z": "has ended",
    "X": "has ended",
    "I": "sleeps",
}
GONE = "has ended"

_FILE_FIRST = {
    "x86_64": {0: "read", 1: "write", 3: "close", 17: "pread", 18: "pwrite", 74: "fsync",
               75: "fdatasync", 77: "ftruncate", 78: "getdents", 217: "getdents", 5: "fstat",
               295: "preadv", 296: "pwritev", 285: "fallocate", 40: "sendfile"},
    "aarch64": {63: "read", 64: "write", 57: "close", 67: "pread", 68: "pwrite", 82: "fsync",
                83: "fdatasync", 46: "ftruncate", 61: "getdents", 80: "fstat", 69: "preadv",
                70: "pwritev", 47: "fallocate"},
}  # fmt: skip
"""Calls of the system whose first argument is an open file, by their numbers."""
_PATH_FIRST = {
    "x86_64": {2: "open", 4: "stat", 6: "lstat", 82: "rename", 83: "mkdir", 84: "rmdir",
               87: "unlink", 21: "access", 76: "truncate", 89: "readlink"},
    "aarch64": {},
}  # fmt: skip
_PATH_SECOND = {
    "x86_64": {257: "open", 262: "stat", 263: "unlink", 264: "rename", 316: "rename", 332: "stat",
               258: "mkdir", 269: "access", 439: "access", 267: "readlink"},
    "aarch64": {56: "open", 79: "stat", 35: "unlink", 38: "rename", 276: "rename", 291: "stat",
                34: "mkdir", 48: "access", 439: "access", 78: "readlink"},
}  # fmt: skip
_LONGEST = 4096


def process_space() -> str:
    """Return the namespace in which process ids are valid: host, its boot, and namespace."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {started} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def state_letter(pid: int, thread: int | None = None) -> str | None:
    """Letter of the state of a process or thread; None if it does not exist."""
    file = f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat"
    try:
        # The name is in brackets and may contain anything; the state follows.
        return Path(file).read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def state_of(pid: int) -> str:
    """Return the state of a process of this machine, in words: it runs, is stopped, has ended."""
    letter = state_letter(pid)
    if letter is None:
        if sys.platform == "linux":
            return GONE
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return GONE
        except OSError:
            pass
        return "runs"
    words = _WORDS.get(letter, f"is in state {letter}")
    return f"{words} in {file}" if letter == "D" and (file := awaited_file(pid)) else words


def awaited_file(pid: int, thread: int | None = None) -> str | None:
    """Return call and path of the file for which a thread waits, such as ``fsync of /data/x``; None
    if it waits for something else. Nothing here touches the file."""
    task = f"/proc/{pid}/task/{pid if thread is None else thread}"
    try:
        words = Path(f"{task}/syscall").read_text().split()
        number, arguments = int(words[0]), [int(word, 16) for word in words[1:7]]
    except (OSError, ValueError, IndexError):  # it runs, or belongs to another user
        return None
    machine = platform.machine()
    if (call := _FILE_FIRST.get(machine, {}).get(number)) is not None:
        try:
            path = os.readlink(f"{task}/fd/{arguments[0]}")
        except OSError:
            return None
        return f"{call} of {path}" if path.startswith("/") and _is_file(path) else None
    for calls, place in ((_PATH_FIRST, 0), (_PATH_SECOND, 1)):
        if (call := calls.get(machine, {}).get(number)) is not None:
            named = _text_at(arguments[place], pid)
            return f"{call} of {named}" if named else None
    return None


def _is_file(path: str) -> bool:
    """Not a terminal or another device, which a process may wait for as long as it likes."""
    return not path.startswith(("/dev/pts/", "/dev/tty", "/dev/null", "/dev/nvidia", "/proc/"))


def _text_at(address: int, pid: int) -> str | None:
    """The text, with its end, at an address of this process."""
    if pid != os.getpid() or not address:
        return None
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            text = memory.read(_LONGEST)
    except (OSError, ValueError):
        return ctypes.string_at(address).decode(errors="replace")
    return text.partition(b"\0")[0].decode(errors="replace")


_MEETS = ("/torch/distributed/", "/deepspeed/comm/")
"""Packages whose functions end in a collective, a transfer or a store."""
_MEETS_NOBODY = ("/torch/distributed/tensor/", "/torch/distributed/fsdp/")
"""Some of their modules register thousands of operators when they are imported."""
_DEVICE_SECONDS = 1.0
_WRAPPERS = ("wrapper", "log_wrapper")
_IMPORT = "<frozen importlib"
_INNERMOST = 4
"""Maximum frames between a call of those packages and the innermost one, such as an operator's."""
_PASSES_ON = (
    "/threading.py",
    "/queue.py",
    "/concurrent/futures/_base.py",
    "/torch/autograd/graph.py",
)
"""Functions in which a thread waits for another one of its process, or runs the backward pass in
others."""


def where_it_waits(frames: Mapping[int, FrameType] | None = None) -> FrameType | None:
    """Return the frame in which this process waits for other ranks, in a collective, a transfer or
    the store; None where it works. Costs some microseconds.

    Where the main thread waits for other threads of the process, as in a backward pass on a GPU,
    these are examined too. Threads that read data are not. ``frames``: innermost frame of each
    thread by its identifier.
    """
    frames = frames_of_others() if frames is None else frames
    main = frames.get(threading.main_thread().ident or 0)
    if main is None:
        return None
    if (wait := _meets(main)) is not None:
        return wait
    passes_on = _normal(main.f_code.co_filename).endswith(_PASSES_ON)
    if not passes_on or activity.phase == "data":  # the other thread reads what it waits for
        return None
    others = (frame for frame in frames.values() if frame is not main)
    return next((wait for frame in others if (wait := _meets(frame)) is not None), None)


def frames_of_others() -> dict[int, FrameType]:
    """Innermost frame of each other thread. They keep what functions have in variables: drop them
    soon."""
    frames = sys._current_frames()
    # A frame in one of its own variables lives, with all others, until cycles are looked for.
    frames.pop(threading.get_ident())
    return frames


def device_is_busy() -> bool:
    """True if this process's GPU computes, or waits for other ranks' GPUs. A driver that does not
    answer within a second is busy."""
    asked, answers = activity.device_busy, list[bool]()
    if asked is None:
        return False

    def ask() -> None:
        try:
            answers.append(asked())
        except RuntimeError:  # an error of the device's, with which this rank will end
            answers.append(False)

    thread = threading.Thread(target=ask, name="device", daemon=True)
    thread.start()
    thread.join(_DEVICE_SECONDS)
    return not answers or answers[0]


def collectives_begun() -> int:
    """Return the number of collectives begun in all groups, without groups of background
    threads."""
    torch = sys.modules.get("torch.distributed.distributed_c10d")
    begun = 0
    if torch is not None:
        with contextlib.suppress(RuntimeError):  # a group that is just made
            for group in list(torch._world.pg_map):
                if group not in background_groups:
                    begun += group._get_sequence_number_for_group()
    return begun


def failed_to_meet(error: BaseException | None) -> bool:
    """True if an error, or its cause, says that other ranks did not answer."""
    while error is not None:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if isinstance(error, RuntimeError) and trace is not None:
            code = trace.tb_frame.f_code
            if _is_of_packages(code.co_filename) or _calls_wait(_Identity(code), trace.tb_lineno):
                return True
        error = error.__cause__ or error.__context__
    return False


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def call_site(frame: FrameType) -> str:
    """Return a call and where: ``all_reduce in megatron/parallel/mesh.py:97 any_rank``."""
    name = frame.f_code.co_name
    for outer in outwards(frame):
        file = _normal(outer.f_code.co_filename)
        meets = _is_of_packages(file)
        if "/megatron/" in file and not meets:
            place = f"megatron/{file.rpartition('/megatron/')[2]}:{outer.f_lineno}"
            return f"{name} in {place} {outer.f_code.co_name}"
        if meets:
            name = name if outer.f_code.co_name in _WRAPPERS else outer.f_code.co_name
    return f"{name} in {_normal(frame.f_code.co_filename)}:{frame.f_lineno}"


def _meets(frame: FrameType) -> FrameType | None:
    """The frame of a thread that waits for other ranks, given its innermost one."""
    for inner in islice(outwards(frame), _INNERMOST):
        if inner.f_code.co_name == "<module>":  # it imports, which may be slow
            return None
        if _is_of_packages(inner.f_code.co_filename):
            return None if _is_imported(inner) else inner
    # The handle of a transfer is torch's, without a Python frame.
    return frame if _calls_wait(_Identity(frame.f_code), frame.f_lineno) else None


def _is_imported(frame: FrameType) -> bool:
    """True if a frame runs because a module is imported, which is work."""
    return any(outer.f_code.co_filename.startswith(_IMPORT) for outer in outwards(frame))


class _Identity:
    """A code object as a key of a cache, by identity: constants of compiled code may not be
    hashable."""

    __slots__ = ("code",)

    def __init__(self, code: CodeType) -> None:
        self.code = code

    def __hash__(self) -> int:
        return id(self.code)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.code is self.code


@lru_cache(4096)
def _calls_wait(key: _Identity, line: int) -> bool:
    """True if a line calls a method ``wait`` without a Python frame."""
    lines, here = dict(dis.findlinestarts(key.code)), None
    for instruction in dis.get_instructions(key.code):
        here = lines.get(instruction.offset, here)
        if here == line and instruction.argval == "wait":
            return True
    return False


@lru_cache(4096)
def _is_of_packages(file: str) -> bool:
    path = _normal(file)
    return any(part in path for part in _MEETS) and not any(part in path for part in _MEETS_NOBODY)


@lru_cache(4096)
def _normal(file: str) -> str:
    return file.replace("\\", "/")


SECONDS = 4.0  # for which a machine may not answer: three tries of the system's
_STALE = 5  # looks after which a process that says nothing new is looked into
_UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT}
_ANY_PORT = 9


class Door:
    """A port of this process, in the network of ``towards``. Connections to it succeed while the
    machine lives, also while the process is stopped."""

    def __init__(self, towards: str) -> None:
        self.address: tuple[str, int] = ("", 0)
        """Host and port; port 0 where there can be none, which says nothing about the machine."""
        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError):
            family, own = address_towards(towards)
            self._socket = socket.create_server((own, 0), family=family)
            self._socket.setblocking(False)
            self.address = self._socket.getsockname()[:2]

    def clear(self) -> None:
        """Lets those go that have connected."""
        with contextlib.suppress(BlockingIOError):
            while self._socket is not None:
                self._socket.accept()[0].close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


def address_towards(host: str) -> tuple[int, str]:
    """Return the family and this machine's address in the network of a host. Raises OSError."""
    family, _, _, _, place = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # sends nothing
        return family, str(probe.getsockname()[0])


def is_gone(host: str, port: int, seconds: float = SECONDS) -> bool:
    """True if nothing answers there; a refusal is an answer, an unknown name says nothing."""
    if port == 0:
        return False
    try:
        socket.create_connection((host, port), seconds).close()
    except OSError as error:
        return isinstance(error, TimeoutError) or error.errno in _UNREACHABLE
    return False


class SilentMachines:
    """Finds lost machines. It costs nothing while they send new messages."""

    def __init__(self, gone: Callable[[str, int], bool] = is_gone) -> None:
        self._gone = gone
        self._heard: dict[str, tuple[Hashable, int]] = {}
        """Last message of each, and the number of looks without change."""

    def look(self, said: Mapping[str, tuple[Hashable, tuple[str, int]]]) -> str:
        """Return a machine that is gone, or an empty text. ``said``: the words of each machine, and
        the address of a door there."""
        for name, (words, address) in said.items():
            last, looks = self._heard.get(name, (None, 0))
            looks = looks + 1 if words == last else 0
            if looks >= _STALE:
                if self._gone(*address):
                    return name
                looks = 0
            self._heard[name] = (words, looks)
        return ""


def monitor_thread(work: Callable[[], None], name: str, lost: str) -> threading.Thread:
    """Return a daemon thread that runs ``work`` and outlives no mistake in silence: an error is one
    line of stderr with what is lost by it, such as "hangs are no longer found"."""

    def run() -> None:
        try:
            work()
        except Exception as error:
            reason = one_line(f"{type(error).__name__}: {error}")
            line = f"WARNING: the {name} thread of process {os.getpid()} ended by {reason}; {lost}"
            print(line, file=sys.stderr, flush=True)

    return threading.Thread(target=run, name=name, daemon=True)
