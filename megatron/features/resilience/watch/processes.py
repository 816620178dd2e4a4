"""State of running processes and threads: where they wait, and which machines still answer."""

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
"""System calls whose first argument is a file descriptor, by architecture and number."""
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
    """Return the namespace in which process ids are unique: host, boot and PID namespace."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {started} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def state_letter(pid: int, thread: int | None = None) -> str | None:
    """Return the state letter of a process or thread from /proc, or None if it does not exist."""
    file = f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat"
    try:
        # The process name is in parentheses and may contain any character; the state follows.
        return Path(file).read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def state_of(pid: int) -> str:
    """Return the state of a process on this machine, such as "runs" or "has ended"."""
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
    """Return the system call and path of the file that a thread waits for, such as ``fsync of
    /data/x``. Return None if it waits for something else. The file itself is never accessed."""
    task = f"/proc/{pid}/task/{pid if thread is None else thread}"
    try:
        words = Path(f"{task}/syscall").read_text().split()
        number, arguments = int(words[0]), [int(word, 16) for word in words[1:7]]
    except (OSError, ValueError, IndexError):  # the thread is running, or belongs to another user
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
    """Return whether a path is a file on storage, and not a device that may block indefinitely."""
    return not path.startswith(("/dev/pts/", "/dev/tty", "/dev/null", "/dev/nvidia", "/proc/"))


def _text_at(address: int, pid: int) -> str | None:
    """Return the null-terminated text at a memory address, or None for another process."""
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
"""Packages whose functions run collectives, point-to-point transfers and store operations."""
_MEETS_NOBODY = ("/torch/distributed/tensor/", "/torch/distributed/fsdp/")
"""Exceptions to ``_MEETS``, which do not wait for other ranks. Some of their modules register
thousands of operators when they are imported."""
_DEVICE_SECONDS = 1.0
_WRAPPERS = ("wrapper", "log_wrapper")
_IMPORT = "<frozen importlib"
_INNERMOST = 4
"""Number of innermost frames that are searched for a call of these packages, because the call may
itself have called other functions, such as an operator."""
_PASSES_ON = (
    "/threading.py",
    "/queue.py",
    "/concurrent/futures/_base.py",
    "/torch/autograd/graph.py",
)
"""Files whose functions wait for another thread of the process, or run the backward pass in other
threads."""


def where_it_waits(frames: Mapping[int, FrameType] | None = None) -> FrameType | None:
    """Return the frame in which this process waits for other ranks, in a collective, a transfer or
    the store. Return None if it is working. Takes a few microseconds.

    If the main thread waits for other threads of the process, as in a backward pass on a GPU, those
    threads are examined too, except while it waits for data. ``frames`` maps thread identifiers to
    the innermost frame of each thread.
    """
    frames = frames_of_others() if frames is None else frames
    main = frames.get(threading.main_thread().ident or 0)
    if main is None:
        return None
    if (wait := _meets(main)) is not None:
        return wait
    passes_on = _normal(main.f_code.co_filename).endswith(_PASSES_ON)
    # In the data phase it waits for a thread that reads data, not for other ranks.
    if not passes_on or activity.phase == "data":
        return None
    others = (frame for frame in frames.values() if frame is not main)
    return next((wait for frame in others if (wait := _meets(frame)) is not None), None)


def frames_of_others() -> dict[int, FrameType]:
    """Return the innermost frame of each other thread. Release it soon: frames keep tensors
    alive."""
    frames = sys._current_frames()
    # This function's own frame would refer to itself through its variables, and live until the
    # garbage collector breaks the cycle.
    frames.pop(threading.get_ident())
    return frames


def device_is_busy() -> bool:
    """Return whether this process's GPU is computing, or waits for GPUs of other ranks. A driver
    that does not answer within a second counts as busy."""
    asked, answers = activity.device_busy, list[bool]()
    if asked is None:
        return False

    def ask() -> None:
        try:
            answers.append(asked())
        except RuntimeError:  # a device error, which will end this rank
            answers.append(False)

    thread = threading.Thread(target=ask, name="device", daemon=True)
    thread.start()
    thread.join(_DEVICE_SECONDS)
    return not answers or answers[0]


def collectives_begun() -> int:
    """Return the number of collectives started, except by groups of background threads."""
    torch = sys.modules.get("torch.distributed.distributed_c10d")
    begun = 0
    if torch is not None:
        with contextlib.suppress(RuntimeError):  # raised by a group that is still being created
            for group in list(torch._world.pg_map):
                if group not in background_groups:
                    begun += group._get_sequence_number_for_group()
    return begun


def failed_to_meet(error: BaseException | None) -> bool:
    """Return whether an error, or its cause, was raised because other ranks did not respond."""
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
    """Yield a frame, then its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def call_site(frame: FrameType) -> str:
    """Return a call and its location: ``all_reduce in megatron/parallel/mesh.py:97 any_rank``."""
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
    """Return the frame in which a thread waits for other ranks, or None. ``frame`` is the thread's
    innermost frame."""
    for inner in islice(outwards(frame), _INNERMOST):
        if inner.f_code.co_name == "<module>":  # an import may be slow, but does not wait for ranks
            return None
        if _is_of_packages(inner.f_code.co_filename):
            return None if _is_imported(inner) else inner
    # Torch implements the work handle of a transfer in C++, so its ``wait`` has no Python frame.
    return frame if _calls_wait(_Identity(frame.f_code), frame.f_lineno) else None


def _is_imported(frame: FrameType) -> bool:
    """Return whether a frame runs as part of an import, which does not count as waiting."""
    return any(outer.f_code.co_filename.startswith(_IMPORT) for outer in outwards(frame))


class _Identity:
    """Cache key that compares code objects by identity, because constants of compiled code may not
    be hashable."""

    __slots__ = ("code",)

    def __init__(self, code: CodeType) -> None:
        self.code = code

    def __hash__(self) -> int:
        return id(self.code)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.code is self.code


@lru_cache(4096)
def _calls_wait(key: _Identity, line: int) -> bool:
    """Return whether a line of code calls a ``wait`` method, which may have no Python frame."""
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


SECONDS = 4.0  # timeout of a probe, within which the kernel tries to connect three times
_STALE = 5  # checks without a new message after which a machine is probed
_UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT}
_ANY_PORT = 9


class Door:
    """Listening port of this process, in the network of the host ``towards``. Connections to it
    succeed as long as the machine is up, even while the process is suspended."""

    def __init__(self, towards: str) -> None:
        self.address: tuple[str, int] = ("", 0)
        """Host and port. Port 0 if none could be opened, which says nothing about the machine."""
        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError):
            family, own = address_towards(towards)
            self._socket = socket.create_server((own, 0), family=family)
            self._socket.setblocking(False)
            self.address = self._socket.getsockname()[:2]

    def clear(self) -> None:
        """Accept and close all pending connections."""
        with contextlib.suppress(BlockingIOError):
            while self._socket is not None:
                self._socket.accept()[0].close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


def address_towards(host: str) -> tuple[int, str]:
    """Return the address family and this machine's own address in the network of a host. Raises
    OSError if the host is unknown or unreachable."""
    family, _, _, _, place = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # a UDP socket: this sends nothing
        return family, str(probe.getsockname()[0])


def is_gone(host: str, port: int, seconds: float = SECONDS) -> bool:
    """Return whether a host no longer answers on a port. A refused connection counts as an answer.
    Return False if the host name is unknown, or if the port is 0."""
    if port == 0:
        return False
    try:
        socket.create_connection((host, port), seconds).close()
    except OSError as error:
        return isinstance(error, TimeoutError) or error.errno in _UNREACHABLE
    return False


class SilentMachines:
    """Detector of lost machines. Only machines that send no new messages are probed."""

    def __init__(self, gone: Callable[[str, int], bool] = is_gone) -> None:
        self._gone = gone
        self._heard: dict[str, tuple[Hashable, int]] = {}
        """Last message of each machine, and the number of checks since it changed."""

    def look(self, said: Mapping[str, tuple[Hashable, tuple[str, int]]]) -> str:
        """Return the name of a machine that is gone, or an empty string. ``said`` contains the
        latest message of each machine, and the address of a :class:`Door` on it."""
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
    """Return a daemon thread, not yet started, that runs ``work``. If ``work`` fails, it prints a
    line to stderr that ends with ``lost``, the consequence, such as "hangs are no longer found"."""

    def run() -> None:
        try:
            work()
        except Exception as error:
            reason = one_line(f"{type(error).__name__}: {error}")
            line = f"WARNING: the {name} thread of process {os.getpid()} ended by {reason}; {lost}"
            print(line, file=sys.stderr, flush=True)

    return threading.Thread(target=run, name=name, daemon=True)
